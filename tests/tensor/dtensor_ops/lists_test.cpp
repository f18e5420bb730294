#include "tessera/tensor/dtensor_ops/lists.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using testing::cross;
using testing::indexed;
using testing::on_mesh;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;
using List = std::vector<DTensor>;

const Placement kListSum = Placement::partial();
const Placement kListMax = Placement::partial(ReduceOp::max);

std::vector<at::Tensor> full_tensors() { return {indexed({5, 4}) - 9, indexed({2, 3}) * -0.5, indexed({4, 6}) + 0.25}; }

void expect_equal(const char* op, const List& found, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(at::allclose(found[i].full_tensor(), expected[i]))
        << op << found[i] << found[i].full_tensor() << expected[i];
  }
}

TEST(DTensorListTest, GivesWhatTheOpGivesOnEach) {
  const std::vector<at::Tensor> a = full_tensors(), b = {a[0] + 50, a[1] + 60, a[2] + 70};
  const auto each = [&](const auto& f) {
    std::vector<at::Tensor> expected;
    expected.reserve(a.size());
    for (std::size_t i = 0; i < a.size(); ++i) expected.push_back(f(a[i], b[i]));
    return expected;
  };
  using T = const at::Tensor&;
  using namespace dtensor;  // NOLINT(google-build-using-namespace)
  for (const Sizes& shape : {Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      const std::vector<Placements> choices = cross({R, S0, S1, kListSum}, shape.size());
      for (std::size_t c = 0; c < choices.size(); c += shape.size() * 2 - 1) {
        List x, y;
        for (std::size_t i = 0; i < a.size(); ++i) {
          x.push_back(on_mesh(a[i], mesh, choices[(c + i) % choices.size()]));
          y.push_back(on_mesh(b[i], mesh, choices[c]));
        }
        expect_equal("abs", foreach_abs(x), each([](T s, T) { return s.abs(); }));
        expect_equal("neg", foreach_neg(x), each([](T s, T) { return -s; }));
        expect_equal("sqrt", foreach_sqrt(y), each([](T, T t) { return t.sqrt(); }));
        expect_equal("reciprocal", foreach_reciprocal(y), each([](T, T t) { return 1 / t; }));
        expect_equal("add", foreach_add(x, y), each([](T s, T t) { return s + t; }));
        expect_equal("sub", foreach_sub(x, y), each([](T s, T t) { return s - t; }));
        expect_equal("mul", foreach_mul(x, y), each([](T s, T t) { return s * t; }));
        expect_equal("div", foreach_div(x, y), each([](T s, T t) { return s / t; }));
        expect_equal("maximum", foreach_maximum(x, y), each([](T s, T t) { return at::maximum(s, t); }));
        expect_equal("minimum", foreach_minimum(x, y), each([](T s, T t) { return at::minimum(s, t); }));
        expect_equal("add", foreach_add(x, 2), each([](T s, T) { return s + 2; }));
        expect_equal("sub", foreach_sub(x, 2), each([](T s, T) { return s - 2; }));
        expect_equal("mul", foreach_mul(x, 2), each([](T s, T) { return s * 2; }));
        expect_equal("div", foreach_div(x, 2), each([](T s, T) { return s / 2; }));
        expect_equal("max of abs", foreach_max(foreach_abs(x)), each([](T s, T) { return s.abs().max(); }));
        for (const double p : {0.0, 1.0, 2.0, 3.0, double{INFINITY}, -double{INFINITY}}) {
          expect_equal("norm", foreach_norm(x, p), each([&](T s, T) { return at::linalg_vector_norm(s, p); }));
          const at::Tensor all = at::cat({a[0].flatten(), a[1].flatten(), a[2].flatten()});
          EXPECT_TRUE(at::allclose(get_total_norm(x, p), at::linalg_vector_norm(all, p))) << p;
          if (std::isinf(p)) continue;
          expect_equal("powsum", foreach_powsum(x, p),
                       each([&](T s, T) { return p == 0 ? s.ne(0).sum().to(at::kDouble) : s.abs().pow(p).sum(); }));
        }
        foreach_add_(x, y);
        expect_equal("add_", x, each([](T s, T t) { return s + t; }));
        foreach_sub_(x, y);
        foreach_mul_(x, y);
        expect_equal("mul_", x, each([](T s, T t) { return s * t; }));
        foreach_div_(x, y);
        foreach_mul_(x, 2);
        expect_equal("mul_", x, each([](T s, T) { return s * 2; }));
        foreach_copy_(x, y);
        expect_equal("copy_", x, b);
        foreach_zero_(x);
        expect_equal("zero_", x, each([](T s, T) { return at::zeros_like(s); }));
      }
    });
  }
}

TEST(DTensorListTest, PlacementsAreThoseOfTheOpOnEach) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const auto lists = [&](const Placement& of_x) {
      const std::vector<at::Tensor> tensors = full_tensors();
      List x;
      x.reserve(tensors.size());
      for (const at::Tensor& full : tensors) x.push_back(on_mesh(full, mesh, {of_x}));
      return x;
    };
    const auto placement = [](const List& list) {
      for (const DTensor& x : list) EXPECT_EQ(x.placements(), list[0].placements());
      return list[0].placements()[0];
    };
    for (const Placement& kept : {R, S0, S1, kListSum}) {
      EXPECT_EQ(placement(dtensor::foreach_add(lists(kept), lists(kept))), kept);
      EXPECT_EQ(placement(dtensor::foreach_mul(lists(kept), 3)), kept);
      EXPECT_EQ(placement(dtensor::foreach_neg(lists(kept))), kept);
      EXPECT_EQ(placement(dtensor::foreach_sub(lists(kept), lists(R))), kept);
      EXPECT_EQ(placement(dtensor::foreach_mul(lists(kept), lists(R))), kept);
    }
    EXPECT_EQ(placement(dtensor::foreach_maximum(lists(kListMax), lists(kListMax))), kListMax);
    EXPECT_EQ(placement(dtensor::foreach_sqrt(lists(kListSum))), R);
    EXPECT_EQ(placement(dtensor::foreach_powsum(lists(S0), 2)), kListSum);
    EXPECT_EQ(placement(dtensor::foreach_norm(lists(S0))), R);
    EXPECT_TRUE(dtensor::foreach_norm({}).empty());
    EXPECT_EQ(dtensor::get_total_norm({}).item<double>(), 0);
    EXPECT_ERROR(dtensor::foreach_add(lists(R), List{}), ErrorCode::invalid_argument,
                 "op on lists of 3 and 0 tensors: expected as many of each");
    EXPECT_ERROR(dtensor::get_total_norm(lists(S0), NAN), ErrorCode::invalid_argument, "expected a number");
  });
}

TEST(DTensorListTest, TheSecondListMayHoldPlainTensors) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const std::vector<at::Tensor> a = full_tensors(), b = {a[0] + 50, at::full({}, 3.0, at::kDouble), a[2] + 70};
    for (const Placement& placement : {R, S0, S1, kListSum}) {
      List x;
      for (const at::Tensor& full : a) x.push_back(on_mesh(full, mesh, {placement}));
      const dtensor::AnyTensors plain = b, both = {on_mesh(b[0], mesh, {S1}), b[1], on_mesh(b[2], mesh, {R})};
      for (const dtensor::AnyTensors& y : {plain, both}) {
        expect_equal("add", dtensor::foreach_add(x, y), {a[0] + b[0], a[1] + b[1], a[2] + b[2]});
        expect_equal("mul", dtensor::foreach_mul(x, y), {a[0] * b[0], a[1] * b[1], a[2] * b[2]});
        expect_equal("maximum", dtensor::foreach_maximum(x, y),
                     {at::maximum(a[0], b[0]), at::maximum(a[1], b[1]), at::maximum(a[2], b[2])});
        dtensor::foreach_add_(x, y);
        dtensor::foreach_sub_(x, y);
        dtensor::foreach_div_(x, {2 * at::ones({}, at::kDouble), on_mesh(b[1], mesh, {R}), b[2]});
        dtensor::foreach_mul_(x, {2 * at::ones({}, at::kDouble), on_mesh(b[1], mesh, {R}), b[2]});
        expect_equal("in place", x, a);
        for (const DTensor& each : x) EXPECT_EQ(each.placements(), Placements{placement});
      }
      EXPECT_ERROR(dtensor::foreach_add(x, {b[0]}), ErrorCode::invalid_argument, "op on lists of 3 and 1 tensors");
    }
  });
}

TEST(DTensorListTest, OnAMeshOfThreeDimensionsPlacementsAreThoseOfTheOpOnEach) {
  const std::vector<at::Tensor> a = {indexed({8, 4, 2}), indexed({2, 8}), indexed({8})},
                                b = {a[0] * 2, a[1] * 3, a[2] + 7};
  run_local(8, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2, 2});
    const Placement planes = Placement::shard(2);
    struct Lists {
      std::vector<Placements> of_a, of_b, of_sums;
    };
    const std::vector<Lists> cases = {
        {{{S0, S1, planes}, {S0, S1, R}, {S0, R, S0}},
         {{S0, S1, planes}, {S0, S1, R}, {S0, R, S0}},
         {{S0, S1, planes}, {S0, S1, R}, {S0, R, S0}}},
        {{{R, S0, kListSum}, {kListSum, kListSum, kListSum}, {R, R, R}},
         {{R, S0, kListSum}, {kListSum, kListSum, kListSum}, {R, S0, R}},
         {{R, S0, kListSum}, {kListSum, kListSum, kListSum}, {R, S0, R}}},
        {{{S0, S0, S1}, {S1, R, S1}, {S0, S0, R}},
         {{R, R, R}, {R, R, R}, {R, R, R}},
         {{S0, S0, S1}, {S1, R, S1}, {S0, S0, R}}},
    };
    for (const Lists& lists : cases) {
      List x, y;
      for (std::size_t i = 0; i < a.size(); ++i) {
        x.push_back(on_mesh(a[i], mesh, lists.of_a[i]));
        y.push_back(on_mesh(b[i], mesh, lists.of_b[i]));
      }
      const List sums = dtensor::foreach_add(x, y);
      expect_equal("add", sums, {a[0] + b[0], a[1] + b[1], a[2] + b[2]});
      for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(sums[i].placements(), lists.of_sums[i]) << i;
      dtensor::foreach_add_(x, y);
      expect_equal("add_", x, {a[0] + b[0], a[1] + b[1], a[2] + b[2]});
    }
  });
}

TEST(DTensorListTest, TensorsMayBeOnSeveralMeshes) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh both(group, {2, 2}, {"x", "y"}), x = both["x"], y = both["y"];
    const at::Tensor a = indexed({5, 4}), b = indexed({3, 2}) * 2, c = indexed({4});
    const List list = {on_mesh(a, x, {S0}), on_mesh(b, y, {kListSum}), on_mesh(c, both, {S0, kListSum}),
                       on_mesh(c, x, {R})};
    const List norms = dtensor::foreach_norm(list);
    EXPECT_EQ(norms[0].device_mesh(), x);
    EXPECT_EQ(norms[1].device_mesh(), y);
    expect_equal("norm", norms, {a.norm(), b.norm(), c.norm(), c.norm()});
    const List sums = dtensor::foreach_add(list, list);
    EXPECT_EQ(sums[1].device_mesh(), y);
    expect_equal("add", sums, {a * 2, b * 2, c * 2, c * 2});
    for (const double p : {2.0, double{INFINITY}}) {
      const at::Tensor expected = at::linalg_vector_norm(at::cat({a.flatten(), b.flatten(), c, c}), p);
      EXPECT_TRUE(at::allclose(dtensor::get_total_norm(list, p), expected));
    }
    EXPECT_ERROR(dtensor::foreach_add({list[0]}, {list[1]}), ErrorCode::invalid_argument,
                 "the tensors are on different meshes, expected one mesh");
  });
}

TEST(DTensorListTest, GradientsAreClippedToTheTotalNorm) {
  const std::vector<at::Tensor> full = full_tensors();
  const at::Tensor norm = at::cat({full[0].flatten(), full[1].flatten(), full[2].flatten()}).norm();
  run_local(4, [&](const ProcessGroup& group) {
    const DeviceMesh both(group, {2, 2}, {"x", "y"}), line = both["x"];
    const auto parameters = [&] {
      List list = {on_mesh(at::zeros_like(full[0]), both, {S0, S1}), on_mesh(at::zeros_like(full[1]), both, {S0, R}),
                   on_mesh(at::zeros_like(full[2]), line, {S1})};
      for (std::size_t i = 0; i < list.size(); ++i) {
        list[i].requires_grad_();
        dtensor::sum(list[i] * full[i]).full_tensor().backward();
      }
      list.push_back(on_mesh(full[0], both, {S0, R}));  // without a gradient
      return list;
    };
    for (const double max_norm : {1.5, 1e6}) {
      const List list = parameters();
      EXPECT_TRUE(at::allclose(dtensor::clip_grad_norm_(list, max_norm), norm));
      const double scale = std::min(1.0, max_norm / (norm.item<double>() + 1e-6));
      for (std::size_t i = 0; i < full.size(); ++i)
        EXPECT_TRUE(at::allclose(list[i].grad()->full_tensor(), full[i] * scale));
    }
    const List list = parameters();
    list[0].grad()->local_tensor().fill_(NAN);
    EXPECT_ERROR(dtensor::clip_grad_norm_(list, 1, 2, true), ErrorCode::invalid_argument, "expected a finite norm");
    EXPECT_TRUE(at::equal(list[1].grad()->full_tensor(), full[1]));
    const bool is_second = group.rank() == 1;
    EXPECT_ERROR(dtensor::clip_grad_norm_(list, is_second ? 2 : 1), ErrorCode::invalid_argument,
                 "rank 1 has max_norm 2");
    EXPECT_ERROR(dtensor::clip_grad_norm_(list, 1, is_second ? NAN : 2), ErrorCode::invalid_argument, "rank 1");
    for (const double wrong : {double{NAN}, -1.0, -double{INFINITY}}) {
      EXPECT_ERROR(dtensor::clip_grad_norm_(list, wrong), ErrorCode::invalid_argument, "clip_grad_norm_: max_norm is ",
                   ", expected at least 0");
      EXPECT_ERROR(dtensor::clip_grad_norm_(list, is_second ? wrong : 1), ErrorCode::invalid_argument,
                   "rank 1: clip_grad_norm_: max_norm is ");
    }
    EXPECT_ERROR(dtensor::clip_grad_norm_(list, 1, NAN), ErrorCode::invalid_argument, "clip_grad_norm_: norm of order ",
                 ", expected a number");
    EXPECT_TRUE(at::equal(list[1].grad()->full_tensor(), full[1]));
    // One rank that leaves out a gradient is an error on all.
    const List fewer = parameters();
    if (group.rank() == 2) fewer[1].local_tensor().mutable_grad() = at::Tensor();
    EXPECT_ERROR(dtensor::clip_grad_norm_(fewer, 1), ErrorCode::invalid_argument,
                 "which parameters have a gradient 1110", "which parameters have a gradient 1010");
  });
}

TEST(DTensorListTest, GradientsInHalfPrecisionAreClippedToTheirNormInFloat) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor parameter = distribute_tensor(at::zeros({10000}, at::kHalf), mesh, {S0}).requires_grad_();
    for (const double element : {1e-4, 2000.0}) {  // in half precision, the squares are 0 and infinite
      at::Tensor& gradient = parameter.local_tensor().mutable_grad();
      gradient = at::full_like(parameter.local_tensor().detach(), element);
      const double norm = element * 100;
      EXPECT_NEAR(dtensor::clip_grad_norm_({parameter}, norm / 10).item<double>(), norm, norm * 1e-3);
      EXPECT_NEAR(gradient.max().item<double>(), element / 10, element * 1e-2);
      EXPECT_NEAR(dtensor::foreach_norm({parameter.grad().value()})[0].full_tensor().item<double>(), norm / 10,
                  norm * 1e-2);
    }
  });
}

}  // namespace
}  // namespace tessera
