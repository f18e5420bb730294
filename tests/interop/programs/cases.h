#pragma once
// What PyTorch made of inputs, read from a file, and how programs answer whether ours makes the same. A file is
// TorchScript's pickle of (JSON, tensors): a list of dicts, with {"tensor": i} for a tensor. A program prints a line of
// JSON for each: {"row", "what", "ok", "why"}.

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
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
  Case(json content, const std::vector<at::Tensor>& tensors) : content_(std::move(content)), tensors_(&tensors) {}

  const json& content() const { return content_; }
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
  const std::vector<at::Tensor>* tensors_;
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

// Runs each case of each file. `check` throws an error that describes a difference; `row` and `name` label the case.
inline int answer_all(int argc, char** argv,
                      const std::function<void(const Case& test, const std::string& path)>& check,
                      const std::function<std::string(const Case& test)>& row,
                      const std::function<std::string(const Case& test)>& name) {
  try {
    for (int i = 1; i < argc; ++i) {
      std::ifstream file(argv[i], std::ios::binary);
      if (!file) fail(ErrorCode::not_found, "{}: can't be read", argv[i]);
      const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
      const std::vector<c10::IValue> content = torch::jit::pickle_load(bytes).toTuple()->elements().vec();
      const std::vector<at::Tensor> tensors = content[1].toTensorVector();
      std::size_t number = 0;
      for (const json& one : json::parse(content[0].toStringRef())) {
        const Case test(one, tensors);
        std::string why;
        try {
          check(test, argv[i]);
        } catch (const std::exception& error) {
          why = error.what();
        }
        const std::string what = fmt::format("case {} {}", number++, name(test));
        std::cout << json({{"row", row(test)}, {"what", what}, {"ok", why.empty()}, {"why", why}}) << std::endl;
      }
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << argv[0] << ": " << error.what() << '\n';
    return 3;
  }
}

}  // namespace tessera::interop
