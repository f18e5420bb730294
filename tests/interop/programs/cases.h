#pragma once
// What PyTorch made of inputs, read from a file, and how programs answer whether ours makes the same. A file is
// TorchScript's pickle of (JSON, tensors): a list of dicts, with {"tensor": i} for a tensor. A program prints a line of
// JSON for each: {"row", "what", "ok", "why"}. Consecutive cases of as many ranks run in one group: to make a group
// takes longer than most cases.

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/layout/box.h"

namespace tessera::interop {

using nlohmann::json;

// Describes the difference.
class Difference : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Args>
void require(bool holds, fmt::format_string<Args...> format, Args&&... args) {
  if (!holds) throw Difference(fmt::format(format, std::forward<Args>(args)...));
}

class Case {
 public:
  Case(json content, std::shared_ptr<const std::vector<at::Tensor>> tensors, std::string file)
      : content_(std::move(content)), tensors_(std::move(tensors)), file_(std::move(file)) {}

  const json& content() const { return content_; }
  /// Where it is from.
  const std::string& file() const { return file_; }
  bool has(const std::string& key) const { return content_.contains(key); }
  template <typename T>
  T get(const std::string& key) const {
    return content_.at(key).get<T>();
  }
  at::Tensor tensor(const std::string& key) const { return to_tensor(content_.at(key)); }
  std::vector<at::Tensor> tensors(const std::string& key) const { return to_tensors(content_.at(key)); }
  at::Tensor to_tensor(const json& value) const { return tensors_->at(value.at("tensor").get<std::size_t>()); }
  std::vector<at::Tensor> to_tensors(const json& list) const {
    std::vector<at::Tensor> tensors;
    for (const json& member : list) tensors.push_back(to_tensor(member));
    return tensors;
  }

 private:
  json content_;
  std::shared_ptr<const std::vector<at::Tensor>> tensors_;
  std::string file_;
};

inline std::string described(const at::Tensor& tensor) {
  return fmt::format("{} of size {}", c10::toString(tensor.scalar_type()), shape_to_string(tensor.sizes().vec()));
}

inline void require_equal(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  require(found.sizes() == expected.sizes(), "{}: {}, PyTorch has {}", what, described(found), described(expected));
  require(found.scalar_type() == expected.scalar_type() && at::equal(found, expected), "{}: not equal", what);
}

inline void require_close(const at::Tensor& found, const at::Tensor& expected, const std::string& what,
                          double rtol = 1e-9) {
  require(found.sizes() == expected.sizes(), "{}: {}, PyTorch has {}", what, described(found), described(expected));
  require(found.scalar_type() == expected.scalar_type(), "{}: {}, PyTorch has {}", what, described(found),
          described(expected));
  if (!found.is_floating_point()) return require_equal(found, expected, what);
  require(at::allclose(found, expected, rtol, 1e-12, true), "{}: they differ by {}", what,
          (found - expected).abs().max().item<double>());
}

// What a program does with a case.
struct Program {
  std::function<int(const Case& test)> ranks;
  // Called on each rank of a new group. Returns a function that throws an error that describes a difference.
  std::function<std::function<void(const Case& test)>(const ProcessGroup& group)> checker;
  std::function<std::string(const Case& test)> row;
  std::function<std::string(const Case& test)> name;
};

inline std::vector<Case> cases_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(ErrorCode::not_found, "{}: can't be read", path);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::vector<c10::IValue> content = torch::jit::pickle_load(bytes).toTuple()->elements().vec();
  const auto tensors = std::make_shared<const std::vector<at::Tensor>>(content[1].toTensorVector());
  std::vector<Case> cases;
  for (json& one : json::parse(content[0].toStringRef())) cases.emplace_back(std::move(one), tensors, path);
  return cases;
}

inline void print_answer(const Program& program, const Case& test, std::size_t number, const std::string& why) {
  const std::string what = fmt::format("case {} {}", number, program.name(test));
  std::cout << json({{"row", program.row(test)}, {"what", what}, {"ok", why.empty()}, {"why", why}}) << std::endl;
}

// Runs the cases from `first` that have as many ranks, up to one that fails, in one group. Returns the number of the
// next case.
inline std::size_t answer_some(const Program& program, const std::vector<Case>& cases, std::size_t first) {
  const int ranks = program.ranks(cases[first]);
  std::mutex mutex;
  std::size_t next = first;
  std::string why;  // of the failure of case `next`
  const auto answer = [&](const ProcessGroup& group) {
    const auto check = program.checker(group);
    for (std::size_t i = first; i < cases.size() && program.ranks(cases[i]) == ranks; ++i) {
      try {
        check(cases[i]);
        group.barrier();
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        if (why.empty()) why = error.what();
        throw;
      }
      if (group.rank() != 0) continue;
      print_answer(program, cases[i], i, "");
      const std::lock_guard lock(mutex);
      next = i + 1;
    }
  };
  try {
    run_local(ranks, answer);
  } catch (const std::exception& error) {
    if (why.empty()) why = error.what();
    print_answer(program, cases[next], next, why);
    ++next;
  }
  return next;
}

// Runs each case of each file.
inline int answer_all(int argc, char** argv, const Program& program) {
  try {
    for (int i = 1; i < argc; ++i) {
      const std::vector<Case> cases = cases_of(argv[i]);
      for (std::size_t next = 0; next < cases.size();) next = answer_some(program, cases, next);
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << argv[0] << ": " << error.what() << '\n';
    return 3;
  }
}

}  // namespace tessera::interop
