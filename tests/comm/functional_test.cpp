#include "tessera/comm/functional.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

// LibTorch conjugates lazily: the gradient of y in y.conj() is a view of memory that is not conjugated.
TEST(FunctionalTest, GradientsOfConjugatesAreConjugated) {
  run_local(2, [](const ProcessGroup& group) {
    const std::vector<std::int64_t> splits = {2, 2};
    const at::Tensor weight = at::complex(at::arange(1, 5, at::kFloat), at::arange(5, 9, at::kFloat));
    struct Case {
      const char* name;
      std::int64_t rows;  // of the input
      std::function<at::Tensor(const at::Tensor&)> call;
      at::Tensor gradient;
    };
    const std::vector<Case> cases = {
        {"all_gather", 2, [&](const at::Tensor& x) { return functional::all_gather(group, x); },
         weight.narrow(0, 2 * group.rank(), 2).mul(2)},
        {"reduce_scatter", 8, [&](const at::Tensor& x) { return functional::reduce_scatter(group, x); },
         weight.repeat({2})},
        {"all_reduce", 4, [&](const at::Tensor& x) { return functional::all_reduce(group, x); }, weight.mul(2)},
        {"all_to_all", 4, [&](const at::Tensor& x) { return functional::all_to_all(group, x, splits, splits); },
         weight.narrow(0, 2 * group.rank(), 2).repeat({2})},
    };
    for (const Case& one : cases) {
      const at::Tensor x = at::ones({one.rows}, at::kComplexFloat).requires_grad_();
      at::real(one.call(x).conj().mul(weight)).sum().backward();
      EXPECT_TRUE(at::equal(x.grad().resolve_conj(), one.gradient)) << one.name << ": " << x.grad();
    }
  });
}

TEST(FunctionalTest, SplitsWhoseElementsCannotBeCountedAreRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor x = at::ones({2, 4});
    const std::vector<std::int64_t> rows = {1, 1}, wraps_to_0 = {std::int64_t{1} << 62, std::int64_t{1} << 62};
    for (const auto& [out, in] : {std::pair(wraps_to_0, rows), {rows, wraps_to_0}}) {
      EXPECT_ERROR(functional::all_to_all(group, x, out, in), ErrorCode::invalid_argument,
                   "splits [4611686018427387904, 4611686018427387904]", "at most 2305843009213693951 rows");
    }
    EXPECT_TRUE(at::equal(functional::all_to_all(group, x, rows, rows), x));
  });
}

TEST(FunctionalTest, ConjugatedInputsAreConjugated) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor x = at::complex(at::ones({2}), at::ones({2})).conj();
    EXPECT_TRUE(at::equal(functional::all_gather(group, x), x.repeat({2}).resolve_conj()));
    EXPECT_TRUE(at::equal(functional::all_reduce(group, x), x.mul(2).resolve_conj()));
    EXPECT_TRUE(at::equal(functional::reduce_scatter(group, x), x.narrow(0, 0, 1).mul(2).resolve_conj()));
  });
}

}  // namespace
}  // namespace tessera
