#include "tessera/checkpoint/verify.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "checkpoint/buffer.h"
#include "checkpoint/source/expansion.h"
#include "checkpoint/source/foreign.h"
#include "checkpoint/source/shard_index.h"
#include "checkpoint/source/source.h"
#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/base/thread_pool.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/internal/file_names.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/format/dcp_metadata.h"
#include "tessera/format/torch_checkpointing.h"
#include "tessera/format/zip.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr std::uint64_t kBlockBytes = 4u << 20;
constexpr std::size_t kListedNames = 5;

// Returns "'a', 'b' and 3 more".
std::string list_names(const std::vector<std::string>& names) {
  std::string text;
  const std::size_t listed = names.size() > kListedNames + 1 ? kListedNames : names.size();
  for (std::size_t i = 0; i < listed; ++i) text += fmt::format("{}'{}'", i == 0 ? "" : ", ", printable(names[i]));
  return listed == names.size() ? text : text + fmt::format(" and {} more", names.size() - listed);
}

class Verifier {
 public:
  Verifier(fs::path path, const VerifyOptions& options)
      : path_(std::move(path)),
        options_(options),
        progress_(options.progress != nullptr ? *options.progress : no_progress()),
        pool_(threads_for(options.jobs)) {}

  VerifyReport run() {
    const std::optional<fs::path> directory = checkpoint_directory(path_);
    is_directory_ = directory.has_value();
    directory_ = directory.value_or(path_.parent_path());
    check_sidecar();
    try {
      OpenOptions open_options;
      open_options.check_checksums = false;  // check_sidecar() did, and reports all damage
      checkpoint_ = Checkpoint::open(path_, open_options);
      report_.warnings = checkpoint_->warnings();
    } catch (const MissingFiles& error) {
      for (const auto& [file, names] : error.files()) report_missing(file, names);
    } catch (const Error& error) {
      // If the sidecar has already shown damage, it explains any error but io.
      const bool explained = (report_.problem_count > 0 || !sidecar_agrees_) && error.code() != ErrorCode::io;
      if (error.code() != ErrorCode::corrupt && !explained) throw;
      add({error.what(), {}, {}, {}});
    }
    if (checkpoint_) place_names();
    report_missing_files();
    check_other_files();
    report_damaged_blocks();
    if (checkpoint_) {
      check_layout();
      check_ranges();
      check_contents();
    }
    pool_.wait();
    progress_.end();
    report_.bytes_checked = bytes_checked_;
    std::sort(report_.left_over.begin(), report_.left_over.end());
    std::sort(report_.other_files.begin(), report_.other_files.end());
    std::sort(report_.problems.begin(), report_.problems.end(), [](const Problem& a, const Problem& b) {
      return std::tie(a.file, a.offset_bytes, a.name, a.what) < std::tie(b.file, b.offset_bytes, b.name, b.what);
    });
    return std::move(report_);
  }

 private:
  void add(Problem problem) {
    const std::lock_guard lock(mutex_);
    if (report_.problem_count >= options_.max_problems) {
      ++report_.problem_count;
      return;
    }
    // Every check that opens a damaged archive reports the same problem.
    if (!reported_.insert(problem.what).second) return;
    ++report_.problem_count;
    report_.problems.push_back(std::move(problem));
  }

  void add_for_file(const std::string& file, std::optional<std::uint64_t> offset, const std::string& name,
                    const std::string& what) {
    std::string text = (directory_ / file).string();
    if (offset) text += fmt::format(" at byte {}", *offset);
    if (!name.empty()) text += fmt::format(": '{}'", printable(name));
    add({text + ": " + what, file, offset, name});
  }

  void check_cancelled() const {
    if (options_.cancellation != nullptr) options_.cancellation->check();
  }

  // Returns the CRC-32 of a range, read in blocks. `counts` is false if the sidecar's checksum covers it too.
  std::uint32_t checksum(const ByteSource& file, std::uint64_t offset_bytes, std::uint64_t length_bytes, bool counts) {
    thread_local Buffer buffer;
    std::uint32_t crc = 0;
    for (std::uint64_t done = 0; done < length_bytes;) {
      check_cancelled();
      const MutableByteView block = buffer.get(std::min(kBlockBytes, length_bytes - done));
      file.read_at(offset_bytes + done, block);
      crc = crc32(block, crc);
      done += block.size();
      if (!counts) continue;
      bytes_checked_ += block.size();
      progress_.advance(block.size());
    }
    return crc;
  }

  // Runs a check. Damage that it throws becomes a problem; other errors end the verification.
  template <typename Check>
  void report_damage(const std::string& file, std::optional<std::uint64_t> offset, const std::string& name,
                     const Check& check) {
    try {
      check();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::corrupt && error.code() != ErrorCode::not_found) throw;
      add({error.what(), file, offset, name});
    }
  }

  // --- the sidecar: size and CRC-32 of every file

  void check_sidecar() {
    report_damage(std::string(kSidecarFileName), {}, {}, [&] { sidecar_ = read_sidecar(path_); });
    std::error_code ignored;
    report_.has_sidecar = sidecar_.has_value() || fs::exists(sidecar_path(path_), ignored);
    if (!sidecar_) return;
    std::uint64_t total = 0;
    for (const auto& [name, facts] : sidecar_->files) total += facts.size_bytes;
    progress_.begin("verify", total);
    for (const auto& [name, facts] : sidecar_->files) {
      const fs::path relative(name);
      const bool leaves = relative.is_absolute() || std::find(relative.begin(), relative.end(), "..") != relative.end();
      if (leaves) {
        add_for_file(
            std::string(kSidecarFileName), {}, {},
            fmt::format("lists '{}', which is outside of the checkpoint, expected its files", printable(name)));
        continue;
      }
      pool_.submit([this, name = name, facts = facts] { check_file(name, facts); });
    }
    pool_.wait();
    report_.sidecar_agrees = sidecar_agrees_;
  }

  void check_file(const std::string& name, const Sidecar::FileFacts& facts) {
    std::error_code error;
    if (!fs::is_regular_file(directory_ / name, error)) {
      const std::lock_guard lock(files_mutex_);
      missing_files_.insert(name);
      sidecar_agrees_ = false;
      return;
    }
    const File file = File::open_read(directory_ / name);
    const std::uint64_t size = file.size_bytes();
    if (size != facts.size_bytes) {
      sidecar_agrees_ = false;
      add_for_file(name, std::min(size, facts.size_bytes), {},
                   fmt::format("the file has {} bytes, expected {} as in the sidecar{}", size, facts.size_bytes,
                               if_overwritten(name)));
      return;
    }
    std::uint32_t all = 0;
    bool is_damaged = false;
    for (std::size_t i = 0; i < facts.blocks(); ++i) {
      const std::uint64_t begin = facts.block_begin(i), length = facts.block_end(i) - begin;
      const std::uint32_t crc = checksum(file, begin, length, true);
      all = i == 0 ? crc : crc32_combine(all, crc, length);
      if (crc == facts.block_crc(i)) continue;
      is_damaged = true;
      const std::lock_guard lock(files_mutex_);
      damaged_blocks_.push_back({name, begin, length, crc, facts.block_crc(i)});
    }
    if (is_damaged || all != facts.crc32) sidecar_agrees_ = false;
    if (!is_damaged && all != facts.crc32) {
      add_for_file(std::string(kSidecarFileName), {}, {},
                   fmt::format("'{}' has CRC-32 {:08x}, expected {:08x}, which is that of its blocks", printable(name),
                               facts.crc32, all));
    }
  }

  // Returns an addition to a message if a file is younger than the sidecar.
  std::string_view if_overwritten(const std::string& name) const {
    std::error_code error;
    const auto file = fs::last_write_time(directory_ / name, error);
    if (error) return "";
    const auto sidecar = fs::last_write_time(sidecar_path(path_), error);
    return !error && file > sidecar ? "; the file was overwritten since the sidecar was written" : "";
  }

  // Adds a problem for each damaged block, naming the tensors and objects in it.
  void report_damaged_blocks() {
    for (const DamagedBlock& block : damaged_blocks_) {
      check_cancelled();
      if (report_.problem_count >= options_.max_problems) {  // only counted
        ++report_.problem_count;
        continue;
      }
      const std::vector<std::string> names = names_in(block.file, block.begin, block.begin + block.length);
      add_for_file(block.file, block.begin, names.size() == 1 ? names[0] : "",
                   fmt::format("{} bytes have CRC-32 {:08x}, expected {:08x} as in the sidecar{}{}", block.length,
                               block.found, block.expected, names.size() > 1 ? "; they hold " + list_names(names) : "",
                               if_overwritten(block.file)));
    }
  }

  // --- files

  void report_missing(const std::string& file, const std::vector<std::string>& names) {
    missing_files_.erase(file);
    add_for_file(file, {}, names.size() == 1 ? names[0] : "",
                 "the file is missing" + (names.size() > 1 ? ", expected it for " + list_names(names) : ""));
    reported_missing_.insert(file);
  }

  void report_missing_files() {
    if (checkpoint_) {
      for (const SourceFile& file : checkpoint_->files()) {
        if (!file.size_bytes) missing_files_.insert(file.name);
      }
    }
    for (const std::string& file : std::set<std::string>(missing_files_)) {
      if (reported_missing_.contains(file)) continue;
      check_cancelled();
      report_missing(file, names_in(file, 0, UINT64_MAX));
    }
  }

  // Finds the files beside those of the checkpoint.
  void check_other_files() {
    if (!is_directory_) return;
    std::set<std::string> known;
    if (checkpoint_) {
      for (const SourceFile& file : checkpoint_->files()) known.insert(file.name);
    }
    std::error_code error;
    for (fs::directory_iterator it(directory_, error), end; !error && it != end; it.increment(error)) {
      const std::string name = it->path().filename().string();
      const bool is_listed = sidecar_ && sidecar_->files.contains(name);
      std::error_code broken_link;
      if (!it->is_regular_file(broken_link) || name == kSidecarFileName || is_listed) continue;
      if (known.contains(name)) {
        if (sidecar_) add_for_file(name, {}, {}, "the sidecar does not list it, expected all files of the checkpoint");
      } else if (may_be_left_by_a_save(name)) {
        report_.left_over.push_back(name);
      } else if (name.ends_with(".distcp") && checkpoint_ && checkpoint_->kind() == SourceKind::dcp) {
        add_for_file(name, {}, {}, "the metadata does not refer to it, expected it to refer to every data file");
      } else if (name != kMetadataFileName && name != torch_checkpointing::kMetadataFileName && !index_kind(name) &&
                 !parse_rank_metadata_name(name)) {
        report_.other_files.push_back(name);
      }
    }
    if (error) fail(ErrorCode::io, "list {}: {}", directory_.string(), error.message());
  }

  // --- which tensors and objects are where in the files

  struct Place {
    std::uint64_t begin, end;
    std::size_t item;  // tensors come first, then objects
    bool operator<(const Place& other) const { return std::tie(begin, end) < std::tie(other.begin, other.end); }
  };
  struct Places {
    std::vector<Place> sorted;
    std::vector<std::uint64_t> ends;  // the largest end of this place and those before
  };

  void place_names() {
    places_.resize(checkpoint_->files().size());
    for (std::size_t f = 0; f < places_.size(); ++f) file_numbers_.emplace(checkpoint_->files()[f].name, f);
    const std::size_t tensors = checkpoint_->tensors().size();
    const auto take = [&](const StoredRange& stored, std::size_t item) {
      if (stored.file == StoredRange::kNoFile) return;
      places_[stored.file].sorted.push_back({stored.offset_bytes, stored.offset_bytes + stored.length_bytes, item});
    };
    for (std::size_t i = 0; i < tensors; ++i) {
      for (const StoredRange& stored : checkpoint_->tensors()[i].stored) take(stored, i);
    }
    for (std::size_t i = 0; i < checkpoint_->objects().size(); ++i) take(checkpoint_->objects()[i].stored, tensors + i);
    for (Places& places : places_) {
      std::sort(places.sorted.begin(), places.sorted.end());
      std::uint64_t end = 0;
      for (const Place& place : places.sorted) places.ends.push_back(end = std::max(end, place.end));
    }
  }

  // Returns the tensors and objects with bytes in a range of a file, if the checkpoint is open.
  std::vector<std::string> names_in(const std::string& file, std::uint64_t begin, std::uint64_t end) const {
    const auto number = file_numbers_.find(file);
    if (number == file_numbers_.end()) return {};
    const Places& places = places_[number->second];
    std::set<std::size_t> items;
    const auto first = std::upper_bound(places.ends.begin(), places.ends.end(), begin) - places.ends.begin();
    for (auto at = static_cast<std::size_t>(first); at < places.sorted.size() && places.sorted[at].begin < end; ++at) {
      if (places.sorted[at].end > begin) items.insert(places.sorted[at].item);
    }
    std::vector<std::string> names;
    names.reserve(items.size());
    const std::size_t tensors = checkpoint_->tensors().size();
    for (const std::size_t item : items) {
      names.push_back(item < tensors ? checkpoint_->tensors()[item].name : checkpoint_->objects()[item - tensors].name);
    }
    return names;
  }

  // --- tensors against their shapes

  void check_layout() {
    const Checkpoint& checkpoint = *checkpoint_;
    report_.tensors = checkpoint.tensors().size();
    report_.objects = checkpoint.objects().size();
    report_.files = checkpoint.files().size();
    for (std::size_t i = 0; i < checkpoint.tensors().size(); ++i) {
      report_.chunks += checkpoint.tensors()[i].chunks.size();
      report_damage({}, {}, checkpoint.tensors()[i].name, [&] { checkpoint.check_partition(i); });
    }
  }

  // --- stored ranges against files

  struct Range {
    std::uint64_t begin, end;
    std::string_view name;
    bool operator<(const Range& other) const { return std::tie(begin, end) < std::tie(other.begin, other.end); }
  };

  void check_ranges() {
    // Opening a checkpoint of another format accounts for every byte.
    if (checkpoint_->kind() != SourceKind::dcp) return;
    std::vector<std::vector<Range>> ranges(checkpoint_->files().size());
    const auto take = [&](const StoredRange& stored, std::string_view name) {
      if (stored.file != StoredRange::kNoFile) {
        ranges[stored.file].push_back({stored.offset_bytes, stored.offset_bytes + stored.length_bytes, name});
      }
    };
    for (const TensorInfo& tensor : checkpoint_->tensors()) {
      for (const StoredRange& stored : tensor.stored) take(stored, tensor.name);
    }
    for (const ObjectInfo& object : checkpoint_->objects()) take(object.stored, object.name);
    for (const StoredCopy& copy : checkpoint_->copies()) take(copy.stored, copy.name);
    check_unclaimed(ranges);
    for (std::size_t f = 0; f < ranges.size(); ++f) {
      if (checkpoint_->files()[f].size_bytes) check_file_ranges(checkpoint_->files()[f], ranges[f]);
    }
  }

  void check_unclaimed(std::vector<std::vector<Range>>& ranges) {
    const dcp::Metadata& metadata = *checkpoint_->dcp_metadata();
    for (const dcp::UnclaimedItem& item : metadata.unclaimed) {
      const std::string& file =
          item.item.file == dcp::StoredItem::kNoFile ? std::string() : metadata.files[item.item.file];
      const auto offset = static_cast<std::uint64_t>(item.item.offset_bytes);
      check_cancelled();
      add_for_file(file, offset, item.name, "found a stored item that is not in the state, expected none");
      if (const auto number = file_numbers_.find(file); number != file_numbers_.end()) {
        ranges[number->second].push_back(
            {offset, offset + static_cast<std::uint64_t>(item.item.length_bytes), item.name});
      }
    }
  }

  void check_file_ranges(const SourceFile& file, std::vector<Range>& ranges) {
    std::sort(ranges.begin(), ranges.end());
    std::uint64_t at = 0;
    const Range* last = nullptr;
    const auto hole = [&](std::uint64_t end) {
      if (end > at)
        add_for_file(file.name, at, {}, fmt::format("{} bytes that nothing refers to, expected none", end - at));
    };
    for (const Range& range : ranges) {
      if (range.begin == range.end) continue;
      if (range.end > *file.size_bytes || range.end < range.begin) {
        add_for_file(file.name, range.begin, std::string(range.name),
                     fmt::format("{} bytes are stored here, expected them within the file's {} bytes",
                                 range.end - range.begin, *file.size_bytes));
        continue;
      }
      // Chunks without elements may share an item.
      if (last != nullptr && range.begin == last->begin && range.end == last->end && range.name == last->name) continue;
      if (range.begin < at) {
        add_for_file(file.name, range.begin, std::string(range.name),
                     fmt::format("overlaps '{}', which is stored up to byte {}, expected ranges of their own",
                                 printable(last->name), at));
      }
      hole(range.begin);
      at = std::max(at, range.end);
      last = &range;
    }
    hole(*file.size_bytes);
  }

  // --- contents

  void check_contents() {
    const std::uint64_t total = stored_bytes(checkpoint_->files());
    items_.emplace(total, total);
    if (!sidecar_) progress_.begin("verify", total);
    switch (checkpoint_->kind()) {
      case SourceKind::dcp:
        check_items();
        break;
      case SourceKind::torch:
      case SourceKind::torch_checkpointing:
        check_archives();
        break;
      case SourceKind::safetensors:
        check_objects();
        break;
    }
    pool_.wait();
    count_unchecked();
  }

  bool can_read(const StoredRange& stored) const {
    if (stored.file == StoredRange::kNoFile) return true;  // reading it reports the problem
    const SourceFile& file = checkpoint_->files()[stored.file];
    return file.size_bytes && stored.offset_bytes <= *file.size_bytes &&
           stored.length_bytes <= *file.size_bytes - stored.offset_bytes;
  }

  // Whether to read an item. Any number of them can name the same bytes, so they share a budget.
  bool takes(const StoredRange& stored) {
    if (!can_read(stored) || stored.file == StoredRange::kNoFile) return can_read(stored);
    if (items_->charge(stored.length_bytes)) return true;
    const std::string what = fmt::format(
        "{}: the stored bytes that items share stand for more than {}, expected at most 64 MiB or 16 times the files; "
        "not all items were read",
        path_.string(), format_bytes(items_->limit_bytes()));
    add({what, {}, {}, {}});
    return false;
  }

  void check_items() {
    const Checkpoint& checkpoint = *checkpoint_;
    for (std::size_t t = 0; t < checkpoint.tensors().size(); ++t) {
      const TensorInfo& tensor = checkpoint.tensors()[t];
      for (std::size_t c = 0; c < tensor.chunks.size(); ++c) {
        const StoredRange& stored = tensor.stored[c];
        if (!takes(stored)) continue;
        pool_.submit([this, t, c, &tensor, &stored] {
          const std::string file = stored.file == StoredRange::kNoFile ? "" : checkpoint_->files()[stored.file].name;
          report_damage(file, stored.offset_bytes, tensor.name, [&] { checkpoint_->locate(t, c); });
          check_entries(stored, tensor.name);
        });
      }
    }
    for (const StoredCopy& copy : checkpoint.copies()) {
      if (takes(copy.stored)) pool_.submit([this, &copy] { check_entries(copy.stored, copy.name); });
    }
    check_objects();
  }

  void check_objects() {
    for (std::size_t i = 0; i < checkpoint_->objects().size(); ++i) {
      const ObjectInfo& object = checkpoint_->objects()[i];
      const StoredRange& stored = object.stored;
      if (!takes(stored)) continue;
      pool_.submit([this, i, &object, &stored] {
        const std::string file = stored.file == StoredRange::kNoFile ? "" : checkpoint_->files()[stored.file].name;
        report_damage(file, stored.offset_bytes, object.name, [&] { checkpoint_->load_object(i, ObjectUse::copy); });
        check_entries(stored, object.name);
      });
    }
  }

  bool is_in_sidecar(const std::string& file) const { return sidecar_ && sidecar_->files.contains(file); }

  // Checks the CRC-32 of every entry of a stored item's archive.
  void check_entries(const StoredRange& stored, const std::string& name) {
    check_cancelled();
    if (stored.file == StoredRange::kNoFile) return;
    const std::string& file_name = checkpoint_->files()[stored.file].name;
    report_damage(file_name, stored.offset_bytes, name, [&] {
      const StoredRange item = checkpoint_->without_transforms(stored);
      const std::shared_ptr<const ByteSource> file = checkpoint_->open_file(item.file);
      const zip::Directory directory = zip::read_directory(*file, item.offset_bytes, item.length_bytes);
      for (const zip::Entry& entry : directory.entries) {
        // Offsets in an item whose transforms are undone are none of the file.
        const bool is_in_file = item.file == stored.file;
        check_entry(*file, file_name, entry, name, is_in_file ? entry.data_offset_bytes : stored.offset_bytes);
      }
    });
  }

  void check_entry(const ByteSource& file, const std::string& file_name, const zip::Entry& entry,
                   const std::string& name, std::uint64_t offset_in_file) {
    const std::uint32_t crc = checksum(file, entry.data_offset_bytes, entry.size_bytes, !is_in_sidecar(file_name));
    if (crc == entry.crc32) return;
    add_for_file(file_name, offset_in_file, name,
                 fmt::format("the {} bytes of {} have CRC-32 {:08x}, expected {:08x}", entry.size_bytes,
                             printable(entry.name), crc, entry.crc32));
  }

  // Checks the CRC-32 of every entry of each file that is an archive.
  void check_archives() {
    check_objects();
    std::vector<std::map<std::uint64_t, std::string>> names(checkpoint_->files().size());  // by offset in the file
    const auto take = [&](const StoredRange& stored, const std::string& name) {
      if (stored.file == StoredRange::kNoFile) return;
      std::string& known = names[stored.file][stored.offset_bytes];
      if (!known.empty()) known += ", ";
      known += name;
    };
    for (const TensorInfo& tensor : checkpoint_->tensors()) {
      for (const StoredRange& stored : tensor.stored) take(stored, tensor.name);
    }
    for (const StoredCopy& copy : checkpoint_->copies()) take(copy.stored, copy.name);
    for (std::size_t f = 0; f < names.size(); ++f) {
      const SourceFile& source = checkpoint_->files()[f];
      const std::shared_ptr<const ByteSource> file = checkpoint_->open_file(static_cast<std::uint32_t>(f));
      if (!zip::looks_like_zip(*file)) continue;
      const zip::Directory directory = zip::read_directory(*file, 0, *source.size_bytes);
      for (const zip::Entry& entry : directory.entries) {
        std::string in_entry;
        for (auto at = names[f].lower_bound(entry.data_offset_bytes);
             at != names[f].end() && at->first - entry.data_offset_bytes < entry.size_bytes; ++at) {
          in_entry += (in_entry.empty() ? "" : ", ") + at->second;
        }
        pool_.submit([this, file, entry, &source, in_entry] {
          check_entry(*file, source.name, entry, in_entry, entry.data_offset_bytes);
        });
      }
    }
    pool_.wait();
  }

  // Counts the bytes of files whose format has no checksums and that no sidecar lists.
  void count_unchecked() {
    if (checkpoint_->kind() == SourceKind::dcp) return;
    for (std::size_t f = 0; f < checkpoint_->files().size(); ++f) {
      const SourceFile& file = checkpoint_->files()[f];
      if (is_in_sidecar(file.name) || zip::looks_like_zip(*checkpoint_->open_file(static_cast<std::uint32_t>(f))))
        continue;
      report_.bytes_without_checksum += file.size_bytes.value_or(0);
    }
  }

  fs::path path_, directory_;
  bool is_directory_ = false;
  const VerifyOptions& options_;
  ProgressSink& progress_;
  std::shared_ptr<const Checkpoint> checkpoint_;
  std::optional<Sidecar> sidecar_;
  // A block of a file that differs from the sidecar.
  struct DamagedBlock {
    std::string file;
    std::uint64_t begin, length;
    std::uint32_t found, expected;
  };
  std::atomic<bool> sidecar_agrees_ = true;
  std::mutex files_mutex_;
  std::set<std::string> missing_files_, reported_missing_;
  std::vector<DamagedBlock> damaged_blocks_;
  TextMap<std::size_t> file_numbers_;  // of the files of the checkpoint, by name
  std::vector<Places> places_;         // by file
  std::optional<ExpansionBudget> items_;
  std::atomic<std::uint64_t> bytes_checked_ = 0;
  std::mutex mutex_;
  VerifyReport report_;
  std::set<std::string> reported_;  // the texts of report_.problems
  ThreadPool pool_;                 // last: its threads use all of the above
};

}  // namespace

VerifyReport verify(const fs::path& path, const VerifyOptions& options) {
  require_present(path);
  return Verifier(path, options).run();
}

}  // namespace tessera::checkpoint
