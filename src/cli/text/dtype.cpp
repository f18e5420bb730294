#include "cli/text/dtype.h"

#include <fmt/format.h>

#include <array>
#include <string_view>
#include <utility>

#include "cli/command.h"
#include "cli/text/similar_names.h"

namespace tessera::cli {

DType parse_dtype(const std::string& operation, const std::string& text) {
  static constexpr std::array<std::pair<std::string_view, DType>, 4> kShort = {
      {{"bf16", DType::bfloat16}, {"fp16", DType::float16}, {"fp32", DType::float32}, {"fp64", DType::float64}}};
  for (const auto& [name, dtype] : kShort) {
    if (text == name) return dtype;
  }
  if (const auto dtype = find_dtype(text)) return *dtype;
  if (text == "fp8" || text == "float8") {
    throw UsageError(
        fmt::format("{}: '{}' names several dtypes, expected float8_e4m3fn, float8_e5m2, "
                    "float8_e4m3fnuz, float8_e5m2fnuz or float8_e8m0fnu",
                    operation, text));
  }
  SimilarNames similar(text);
  for (std::size_t i = 0; i < kDTypeCount; ++i) similar.add(dtype_name(static_cast<DType>(i)));
  throw UsageError(fmt::format("{}: PyTorch has no dtype '{}', expected one such as bfloat16 or float32{}", operation,
                               text, similar.suggestion()));
}

}  // namespace tessera::cli
