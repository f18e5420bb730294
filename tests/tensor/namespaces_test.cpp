// The public namespaces of this module can be used together, unqualified: ops on sharded tensors and on DTensors
// overload with each other and with the functions of <cmath>.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "support/error_matchers.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/functional.h"
#include "tessera/tensor/dtensor_op.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/ops.h"
#include "tessera/tensor/tensor_parallel.h"

// NOLINTBEGIN(google-build-using-namespace)
using namespace tessera;
using namespace tessera::functional;
using namespace tessera::ops;
using namespace tessera::dtensor;
// NOLINTEND(google-build-using-namespace)

namespace {

ShardedTensor sharded(const at::Tensor& full) {
  return ShardedTensor::from_tensor(full, tessera::testing::chunk_spec(0, {0}));
}

DTensor distributed(const at::Tensor& full) { return distribute_tensor(full, DeviceMesh()); }

// Every name that both namespaces have.
template <typename T>
std::vector<T> shared_unary_ops(const T& x) {
  return {abs(x),   clone(x),   exp(x),  gelu(x), log(x),    neg(x),  relu(x),
          rsqrt(x), sigmoid(x), silu(x), sqrt(x), square(x), tanh(x), softmax(x, 1)};
}
template <typename T>
std::vector<T> shared_binary_ops(const T& a, const T& b) {
  return {add(a, b), sub(a, b), mul(a, b), div(a, b), add(a, 2), mul(a, 2), div(a, 2)};
}

TEST(NamespacesTest, UnqualifiedOpsOfBothKindsGiveTheSame) {
  const at::Tensor x = at::rand({4, 3}), y = at::rand({4, 3}) + 1;
  auto on_sharded = shared_unary_ops(sharded(x));
  auto on_dtensor = shared_unary_ops(distributed(x));
  for (const ShardedTensor& result : shared_binary_ops(sharded(x), sharded(y))) on_sharded.push_back(result);
  for (const DTensor& result : shared_binary_ops(distributed(x), distributed(y))) on_dtensor.push_back(result);
  on_sharded.push_back(transpose(sharded(x), 0, 1));
  on_dtensor.push_back(transpose(distributed(x), 0, 1));
  on_sharded.push_back(to(sharded(x), {.dtype = at::kDouble}));
  on_dtensor.push_back(to(distributed(x), at::kDouble));
  on_sharded.push_back(layer_norm(sharded(x), {3}, {}));
  on_dtensor.push_back(layer_norm(distributed(x), {3}));
  on_sharded.push_back(std::get<ShardedTensor>(linear(x, sharded(y), {})));
  on_dtensor.push_back(linear(distributed(x), distributed(y)));
  ASSERT_EQ(on_sharded.size(), on_dtensor.size());
  for (std::size_t i = 0; i < on_sharded.size(); ++i) {
    EXPECT_TRUE(at::allclose(on_sharded[i].local_tensor(), on_dtensor[i].local_tensor())) << "op " << i;
  }

  EXPECT_TRUE(equal(sharded(x), sharded(x)));
  EXPECT_TRUE(equal(distributed(x), distributed(x)));
  const at::Tensor ids = at::arange(4);
  EXPECT_TRUE(at::equal(embedding(ids, sharded(x), {}), x));
  EXPECT_TRUE(at::equal(embedding(distributed(x), distributed(ids)).local_tensor(), x));
  EXPECT_EQ(abs(-2.5), 2.5);
  EXPECT_EQ(sqrt(4.0), 2);
  EXPECT_EQ(div(7, 2).quot, 3);
}

TEST(NamespacesTest, AnOpIsFoundByItsFunction) {
  EXPECT_EQ(op_of(ops::relu).name(), "relu");
  EXPECT_EQ(op_of(ops::embedding_bag).name(), "embedding_bag");
  EXPECT_ERROR(op_of(dtensor::relu), ErrorCode::invalid_argument, "expected a function of tessera::ops");
}

}  // namespace
