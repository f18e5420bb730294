// Saving the state of a rank, step by step.

#include <algorithm>
#include <atomic>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "c/call.h"
#include "c/handles.h"
#include "c/memory.h"
#include "tessera/base/bytes.h"
#include "tessera/checkpoint/internal/save_steps.h"
#include "tessera/checkpoint/storage.h"
#include "tessera/format/internal/json_path.h"

struct tessera_save {
  tessera::checkpoint::FlatState state;
  std::vector<std::size_t> entry_of_row, row_of_entry;  // entries are those of `state`; the first row of each
  std::vector<std::optional<tessera::Bytes>> archives;  // of each entry; set for objects that were passed
  tessera::checkpoint::WriteOptions options;
  tessera::checkpoint::MergedPlans merged;  // on the coordinator
  std::int64_t generation = 0;              // likewise
  std::atomic<std::uint64_t> written_bytes = 0;
  std::optional<tessera::checkpoint::SaveSteps> steps;
};

namespace tessera::c {
namespace {

using checkpoint::FlatState;
using checkpoint::HostMemory;
using checkpoint::StateChunk;
using checkpoint::StateEntry;
using checkpoint::StateObject;
using checkpoint::StateTensor;

// Reads the columns of a state, row by row.
class StateColumns {
 public:
  StateColumns(const tessera_state& columns, tessera_save& save) : columns_(columns), save_(save), state_(save.state) {
    if (columns.count == 0) return;
    required(columns.names, kCall, "names");
    required(columns.dtypes, kCall, "dtypes");
    required(columns.dims, kCall, "dims");
    required(columns.data, kCall, "data");
    required(columns.data_bytes, kCall, "data_bytes");
  }

  void read() {
    for (std::size_t row = 0; row < columns_.count; ++row) {
      name_ = required(columns_.names[row], kCall, "names", row);
      if (columns_.dtypes[row] == nullptr) {
        add_object(row);
      } else {
        add_chunk(row);
      }
      save_.entry_of_row.push_back(entries_.at(name_));
      if (save_.row_of_entry.size() < state_.size()) save_.row_of_entry.push_back(row);
    }
  }

 private:
  static constexpr std::string_view kCall = "tessera_save_new";

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorCode::invalid_argument, "{}: '{}' {}", kCall, printable(name_),
         fmt::format(format, std::forward<Args>(args)...));
  }

  Path path_of(std::size_t row) const {
    if (columns_.paths == nullptr || columns_.paths[row] == nullptr) return {name_};
    const auto parts = nlohmann::json::parse(columns_.paths[row], nullptr, false);
    Path path;
    if (!parts.is_array()) refuse("has the path {}, expected a JSON array", printable(columns_.paths[row]));
    for (const auto& each : parts) {
      std::optional<Key> part = json::path_part(each);
      if (!part) refuse("has the path {}, expected {}", printable(columns_.paths[row]), json::kPathParts);
      path.push_back(*std::move(part));
    }
    return path;
  }

  void add_object(std::size_t row) {
    if (columns_.dims[row] != 0) refuse("is an object with {} dimensions, expected 0", columns_.dims[row]);
    const auto [known, is_new] = entries_.try_emplace(name_, state_.size());
    if (!is_new) {
      const bool is_object = std::holds_alternative<StateObject>(state_[known->second].value);
      refuse("is {} in an earlier row, expected a name of its own for each object",
             is_object ? "an object" : "a tensor");
    }
    const auto archive = [&save = save_, entry = state_.size(), name = name_] {
      const std::optional<Bytes>& passed = save.archives.at(entry);
      if (!passed) {
        fail(ErrorCode::invalid_argument, "tessera_save_write: '{}' was not passed, expected tessera_save_set_object",
             printable(name));
      }
      return *passed;
    };
    state_.push_back({name_, path_of(row), StateObject{archive}});
  }

  std::vector<std::int64_t> numbers(const std::int64_t* column, std::string_view what, std::size_t dims) const {
    if (dims > 0) required(column, kCall, what);
    return {column + numbers_before_, column + numbers_before_ + dims};
  }

  void add_chunk(std::size_t row) {
    const std::optional<DType> dtype = find_dtype(columns_.dtypes[row]);
    if (!dtype) refuse("has dtype '{}', expected one of PyTorch such as float32", printable(columns_.dtypes[row]));
    const std::size_t dims = columns_.dims[row];
    const std::vector<std::int64_t> shape = numbers(columns_.shapes, "shapes", dims);
    const Box box(numbers(columns_.offsets, "offsets", dims), numbers(columns_.sizes, "sizes", dims));
    std::vector<std::int64_t> strides;
    if (columns_.strides != nullptr) strides = numbers(columns_.strides, "strides", dims);
    numbers_before_ += dims;
    if (!is_valid(box, shape)) {
      refuse("has a chunk {}, expected a box within shape {}", to_string(box), shape_to_string(shape));
    }
    if (std::any_of(strides.begin(), strides.end(), [](std::int64_t stride) { return stride < 0; })) {
      refuse("has strides {}, expected none below 0", shape_to_string(strides));
    }
    HostMemory memory = memory_of(row, extent_bytes(box, strides, *dtype));
    memory.strides = std::move(strides);

    TensorProperties properties;
    properties.dtype = *dtype;
    properties.requires_grad = columns_.requires_grad != nullptr && columns_.requires_grad[row] != 0;
    const auto [found, is_new] = entries_.try_emplace(name_, state_.size());
    if (is_new) state_.push_back({name_, path_of(row), StateTensor{properties, shape, {}}});
    auto* tensor = std::get_if<StateTensor>(&state_[found->second].value);
    if (tensor == nullptr) refuse("is an object in an earlier row, expected a name of its own for each object");
    if (tensor->shape != shape || tensor->properties != properties) {
      refuse("has {}, expected {} as in an earlier row", text_of(properties, shape),
             text_of(tensor->properties.value_or(TensorProperties()), tensor->shape));
    }
    tensor->chunks.push_back({box, [memory] { return memory; }});
  }

  static std::string text_of(const TensorProperties& properties, const std::vector<std::int64_t>& shape) {
    return fmt::format("dtype {}, shape {} and requires_grad {}", dtype_name(properties.dtype), shape_to_string(shape),
                       properties.requires_grad);
  }

  HostMemory memory_of(std::size_t row, std::uint64_t bytes) const {
    HostMemory memory;
    memory.data = static_cast<const std::uint8_t*>(columns_.data[row]);
    if (memory.data == nullptr && columns_.read != nullptr) {
      memory.read = [read = columns_.read, context = columns_.context, row, name = name_](std::uint64_t begin_bytes,
                                                                                          MutableByteView out) {
        if (out.empty()) return;
        const int status = read(context, row, begin_bytes, out.size(), out.data());
        if (status == 0) return;
        fail(ErrorCode::io, "tessera_save_write: the caller's function that reads '{}' returned {}, expected 0",
             printable(name), status);
      };
      return memory;
    }
    if (columns_.data_bytes[row] < bytes) {
      refuse("has memory of {} bytes, expected at least {}", columns_.data_bytes[row], bytes);
    }
    if (bytes > 0) required(memory.data, kCall, "data", row);
    return memory;
  }

  const tessera_state& columns_;
  tessera_save& save_;
  FlatState& state_;                            // of save_
  std::string name_;                            // of the row
  std::size_t numbers_before_ = 0;              // of the rows before, in the columns with one for each dimension
  std::map<std::string, std::size_t> entries_;  // by name, in state_
};

std::unique_ptr<tessera_bytes> bytes_of(const Bytes& bytes) {
  return std::make_unique<tessera_bytes>(std::string(as_text(bytes)));
}

// `column` is the name of `messages`.
std::vector<Bytes> messages_of(std::size_t count, const void* const* messages, const std::size_t* sizes,
                               std::string_view function, std::string_view column) {
  std::vector<Bytes> all;
  for (std::size_t r = 0; r < count; ++r) {
    const auto* begin = static_cast<const std::uint8_t*>(messages[r]);
    if (sizes[r] > 0) required(begin, function, column, r);
    all.emplace_back(begin, begin + sizes[r]);
  }
  return all;
}

checkpoint::SaveSteps::Answer answer_of(const tessera_save& save, const void* answer, std::size_t answer_bytes,
                                        std::string_view function) {
  if (save.steps->entries().empty()) {
    fail(ErrorCode::invalid_argument, "{}: found no plan, expected a call of tessera_save_plan before", function);
  }
  return save.steps->read_answer(ByteView(static_cast<const std::uint8_t*>(answer), answer_bytes));
}

}  // namespace
}  // namespace tessera::c

using namespace tessera;

extern "C" {

tessera_status tessera_save_new(const char* path, const tessera_state* state, const tessera_save_options* options,
                                tessera_save** save) {
  return c::call([&] {
    c::required(path, "tessera_save_new", "path");
    c::required(state, "tessera_save_new", "state");
    c::required(save, "tessera_save_new", "save");
    const tessera_save_options given = c::options_of(options, "tessera_save_new");
    auto made = std::make_unique<tessera_save>();
    const tessera_state columns = c::options_of(state, "tessera_save_new");
    c::StateColumns(columns, *made).read();
    made->archives.resize(made->state.size());
    made->options.files_per_rank = std::max<std::size_t>(given.files_per_rank, 1);
    made->options.threads = given.threads;
    made->options.overwrite = given.keep == 0;
    if (given.save_id != nullptr) made->options.save_id = given.save_id;
    c::observe(given.task, made->options);
    made->steps.emplace(made->state, checkpoint::file_system_storage(path), made->options);
    c::give(std::move(made), save);
  });
}

tessera_status tessera_save_plan(tessera_save* save, tessera_bytes** plan) {
  return c::call([&] {
    c::required(save, "tessera_save_plan", "save");
    c::required(plan, "tessera_save_plan", "plan");
    save->steps->make_plan();
    c::give(c::bytes_of(save->steps->plan_message()), plan);
  });
}

tessera_status tessera_save_answer(tessera_save* save, size_t ranks, const void* const* plans, const size_t* plan_bytes,
                                   tessera_bytes** answers) {
  return c::call([&] {
    c::required(save, "tessera_save_answer", "save");
    c::required(plans, "tessera_save_answer", "plans");
    c::required(plan_bytes, "tessera_save_answer", "plan_bytes");
    c::required(answers, "tessera_save_answer", "answers");
    if (ranks == 0) fail(ErrorCode::invalid_argument, "tessera_save_answer: plans of 0 ranks, expected at least 1");
    std::vector<Bytes> messages = c::messages_of(ranks, plans, plan_bytes, "tessera_save_answer", "plans");
    save->merged = {};
    tessera::checkpoint::MergedPlans merged;
    std::vector<std::unique_ptr<tessera_bytes>> made;
    for (const Bytes& answer : save->steps->answer_plans(std::move(messages), merged, save->generation)) {
      made.push_back(c::bytes_of(answer));
    }
    save->merged = std::move(merged);
    for (std::size_t r = 0; r < ranks; ++r) c::give(std::move(made.at(r)), &answers[r]);
  });
}

tessera_status tessera_save_objects(tessera_save* save, const void* answer, size_t answer_bytes, size_t* rows,
                                    size_t* count) {
  return c::call([&] {
    c::required(save, "tessera_save_objects", "save");
    c::required(answer, "tessera_save_objects", "answer");
    c::required(rows, "tessera_save_objects", "rows");
    c::required(count, "tessera_save_objects", "count");
    const checkpoint::SavePlan& plan = save->steps->plan();
    std::size_t found = 0;
    for (const std::uint32_t item : c::answer_of(*save, answer, answer_bytes, "tessera_save_objects").writes) {
      if (plan.entries()[plan[item].entry].is_tensor) continue;
      rows[found++] = save->row_of_entry[plan[item].source.entry];
    }
    *count = found;
  });
}

tessera_status tessera_save_set_object(tessera_save* save, size_t row, const void* archive, size_t archive_bytes) {
  return c::call([&] {
    c::required(save, "tessera_save_set_object", "save");
    const auto* begin = static_cast<const std::uint8_t*>(c::required(archive, "tessera_save_set_object", "archive"));
    if (row >= save->entry_of_row.size()) {
      fail(ErrorCode::invalid_argument,
           "tessera_save_set_object: row {} of a state of {} rows, expected the row of an object", row,
           save->entry_of_row.size());
    }
    const checkpoint::StateEntry& entry = save->state[save->entry_of_row[row]];
    if (!std::holds_alternative<checkpoint::StateObject>(entry.value)) {
      fail(ErrorCode::invalid_argument, "tessera_save_set_object: row {} is the tensor '{}', expected an object", row,
           printable(entry.name));
    }
    save->archives.at(save->entry_of_row[row]) = Bytes(begin, begin + archive_bytes);
  });
}

tessera_status tessera_save_write(tessera_save* save, const void* answer, size_t answer_bytes, tessera_bytes** report) {
  return c::call([&] {
    c::required(save, "tessera_save_write", "save");
    c::required(answer, "tessera_save_write", "answer");
    c::required(report, "tessera_save_write", "report");
    const auto mine = c::answer_of(*save, answer, answer_bytes, "tessera_save_write");
    c::give(c::bytes_of(save->steps->write(mine.writes, mine.rank, mine.generation)), report);
    save->written_bytes = save->steps->report().written_bytes;
  });
}

tessera_status tessera_save_commit(tessera_save* save, size_t ranks, const void* const* reports,
                                   const size_t* report_bytes, int* outcome_unknown) {
  return c::call([&] {
    c::required(save, "tessera_save_commit", "save");
    c::required(reports, "tessera_save_commit", "reports");
    c::required(report_bytes, "tessera_save_commit", "report_bytes");
    if (save->merged.files_of_rank.empty()) {
      fail(ErrorCode::invalid_argument,
           "tessera_save_commit: found no merged plans, expected a tessera_save_answer that succeeded before");
    }
    if (ranks != save->merged.files_of_rank.size()) {
      fail(ErrorCode::invalid_argument,
           "tessera_save_commit: reports of {} ranks, expected {} as in tessera_save_answer", ranks,
           save->merged.files_of_rank.size());
    }
    try {
      save->steps->commit(c::messages_of(ranks, reports, report_bytes, "tessera_save_commit", "reports"), save->merged,
                          save->generation);
    } catch (const checkpoint::OutcomeUnknown&) {
      if (outcome_unknown != nullptr) *outcome_unknown = 1;
      throw;
    }
  });
}

void tessera_save_abandon(tessera_save* save) {
  c::if_given(save, [](tessera_save& given) { given.steps->remove_created(); });
}
uint64_t tessera_save_written_bytes(const tessera_save* save) {
  return c::if_given(save, uint64_t{0}, [](const tessera_save& given) { return given.written_bytes.load(); });
}
void tessera_save_free(tessera_save* save) { delete save; }

}  // extern "C"
