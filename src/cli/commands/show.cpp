#include "cli/commands/show.h"

#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "cli/commands/inspect.h"
#include "cli/output_file.h"
#include "cli/text/dtype.h"
#include "cli/text/names.h"
#include "cli/text/text_table.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/format/npy.h"

namespace tessera::cli {
namespace {

using checkpoint::Checkpoint;
using checkpoint::TensorReader;
using checkpoint::TensorSlice;

constexpr std::int64_t kWriteBytes = 4 << 20;

struct ShowFlags {
  std::string path, name, npy, raw, dtype;
  bool all = false, no_checksums = false, expand = false, quiet = false, all_warnings = false;
};

// A tensor or an object, and the subscript after its name.
struct Named {
  std::optional<std::size_t> tensor, object;
  std::string subscript;
};

// A name that exists is taken as it is, even if it has brackets.
Named find_named(const Checkpoint& checkpoint, const std::string& text) {
  const auto find = [&](const std::string& name, const std::string& subscript) {
    return Named{checkpoint.find_tensor(name), checkpoint.find_object(name), subscript};
  };
  Named named = find(text, "");
  if (named.tensor || named.object) return named;
  std::size_t bracket = text.ends_with(']') ? text.rfind('[') : std::string::npos;
  if (bracket == 0) bracket = std::string::npos;
  const std::string name = text.substr(0, bracket);
  const std::string subscript = bracket == std::string::npos ? "" : text.substr(bracket);
  named = find(name, subscript);
  if (named.tensor || named.object) return named;
  const NamedItems items = find_names(checkpoint, {name});
  const std::size_t count = items.tensors.size() + items.objects.size();
  if (count != 1) {
    fail(ErrorCode::invalid_argument, "{}: {} match '{}', expected one", checkpoint.path().string(),
         counted(count, "name"), printable(name));
  }
  named.subscript = subscript;
  if (!items.tensors.empty()) named.tensor = items.tensors[0];
  if (!items.objects.empty()) named.object = items.objects[0];
  return named;
}

void print_object(Session& session, const Checkpoint& checkpoint, const ShowFlags& flags, const Named& named) {
  const std::string name = printable(checkpoint.objects()[*named.object].name, SIZE_MAX);
  if (!named.subscript.empty() || !flags.npy.empty() || !flags.raw.empty() || !flags.dtype.empty()) {
    fail(ErrorCode::invalid_argument, "{}: '{}' is an object, expected a tensor for a slice, --npy, --raw and --dtype",
         checkpoint.path().string(), name);
  }
  const ShownObject shown = show_object(checkpoint, *named.object);
  checkpoint.compare_rest(&session.cancellation);
  session.out.print("{}  {}\n{}\n", session.out.bold(name), printable(shown.type, SIZE_MAX),
                    printable(shown.repr, SIZE_MAX));
  if (shown.opaque) session.out.print("{}\n", session.out.faint("opaque: " + printable(*shown.opaque, SIZE_MAX)));
}

// Writes the elements to a file, after `header`. What is written to standard output cannot be removed, so it is read
// and compared before, and read again.
void write_elements(Session& session, const ShowFlags& flags, const std::string& path, ByteView header,
                    const Checkpoint& checkpoint, const TensorReader& reader, const TensorSlice& slice, DType dtype) {
  std::optional<OutputFile> file;
  if (path != "-") file.emplace(path);
  const auto write = [&](ByteView bytes) {
    session.cancellation.check();
    if (file) {
      file->write(bytes);
    } else {
      session.out.write(as_text(bytes));
    }
  };
  const std::uint64_t element_bytes = static_cast<std::uint64_t>(dtype_size(dtype));
  const std::uint64_t total_bytes = static_cast<std::uint64_t>(slice.elements()) * element_bytes;
  ProgressSink& progress = *session.progress_unless(flags.quiet);
  const auto read = [&](std::string_view task, FunctionRef<void(ByteView)> visit) {
    progress.begin(task, total_bytes);
    checkpoint::read_slice(reader, slice, dtype, kWriteBytes, [&](ByteView elements) {
      visit(elements);
      progress.advance(elements.size());
    });
  };
  if (!file) {
    read("read", [&](ByteView) { session.cancellation.check(); });
    compare_read(session, checkpoint, reader);
  }
  write(header);
  read("write", write);
  if (file) compare_read(session, checkpoint, reader);
  session.progress.end();
  if (!file) return;
  file->commit();
  session.out.print("wrote {}: {} {}, {}\n", one_line(path), dtype_name(dtype), shape_to_string(slice.shape()),
                    format_bytes(header.size() + total_bytes));
}

ExitStatus show(const ShowFlags& flags, Session& session) {
  std::optional<DType> dtype;
  if (!flags.dtype.empty()) dtype = parse_dtype("--dtype", flags.dtype);
  const auto opened = session.open(flags.path, flags.no_checksums, flags.all_warnings);
  const Named named = find_named(*opened, flags.name);
  if (named.object) {
    print_object(session, *opened, flags, named);
    return kYes;
  }
  opened->check_partition(*named.tensor);
  const TensorReader reader(opened, *named.tensor);
  const TensorSlice slice = named.subscript.empty() ? TensorSlice::full(reader.info().shape)
                                                    : checkpoint::parse_slice(named.subscript, reader.info().shape);
  const bool everything = flags.all || !flags.npy.empty() || !flags.raw.empty();
  if (everything && !flags.expand) checkpoint::check_slice_size(*opened, *named.tensor, slice);
  const DType shown = dtype.value_or(reader.info().dtype);
  if (!flags.npy.empty()) {
    if (!npy::type_string(shown)) {
      fail(ErrorCode::unsupported,
           "write {}: NumPy has no dtype {}, expected one such as float32; use --dtype float32, or --raw for the bytes",
           flags.npy, dtype_name(shown));
    }
    write_elements(session, flags, flags.npy, npy::header(shown, slice.shape()), *opened, reader, slice, shown);
  } else if (!flags.raw.empty()) {
    write_elements(session, flags, flags.raw, {}, *opened, reader, slice, shown);
  } else {
    print_wrapped(session.out,
                  fmt::format("{}  {} {}", session.out.bold(one_line(reader.info().name) + named.subscript),
                              dtype_name(shown), shape_to_string(slice.shape())));
    print_values(session, *opened, reader, slice, shown, flags.all);
  }
  return kYes;
}

}  // namespace

Command show_command() {
  const auto flags = std::make_shared<ShowFlags>();
  return {.name = "show",
          .summary = "Print the values of a tensor, of a part of it, or of an object.",
          .details =
              "NAME is a name, which a subscript of Python may follow: an int or begin:end:step for each dimension, "
              "negative from the end, or '...'. Only the bytes that are printed are read, and those that share their "
              "checksums. A name that has brackets itself is taken as it is. Over 1000 elements are summarized. FILE "
              "must not exist, appears complete or not at all, and may be - for standard output.",
          .examples = {"tessera show step-1000 'model.weight[0:2, :, -1]'",
                       "tessera show step-1000 model.weight --npy weight.npy --dtype float32",
                       "tessera show step-1000 'model.weight[::2]' --raw - | xxd | head"},
          .options = {checkpoint_argument("CKPT", flags->path),
                      {.name = "NAME",
                       .help = "Name of a tensor or an object, with or without a subscript",
                       .target = &flags->name,
                       .positional = true,
                       .required = true},
                      {.name = "all", .help = "Print every element", .target = &flags->all},
                      {.name = "npy",
                       .value_name = "FILE",
                       .help = "Write a file of NumPy",
                       .target = &flags->npy,
                       .is_path = true,
                       .conflicts = "all"},
                      {.name = "raw",
                       .value_name = "FILE",
                       .help = "Write the elements as little-endian bytes, row-major",
                       .target = &flags->raw,
                       .is_path = true,
                       .conflicts = "all npy"},
                      {.name = "dtype",
                       .value_name = "D",
                       .help = "Convert floating-point elements to this type, for example float32",
                       .target = &flags->dtype},
                      no_checksums_option(flags->no_checksums),
                      expand_option(flags->expand),
                      quiet_option(flags->quiet),
                      all_warnings_option(flags->all_warnings)},
          .run = [flags](Session& session) { return show(*flags, session); }};
}

}  // namespace tessera::cli
