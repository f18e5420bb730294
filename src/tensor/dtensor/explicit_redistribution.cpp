#include "tensor/dtensor/explicit_redistribution.h"

#include <utility>

#include "tessera/base/error.h"
#include "tessera/layout/mesh_redistribution.h"
#include "tessera/tensor/dtensor/explicit_redistribution.h"

namespace tessera {

namespace {

thread_local const ExplicitRedistributionContext* innermost = nullptr;

}  // namespace

ExplicitRedistributionContext::ExplicitRedistributionContext(ExplicitRedistributionOptions options)
    : options_(std::move(options)), outer_(std::exchange(innermost, this)) {}

ExplicitRedistributionContext::~ExplicitRedistributionContext() { innermost = outer_; }

class ExplicitRedistributionCheck {
 public:
  static bool is_permitted() { return innermost != nullptr && !innermost->options_.enable; }
  static void check(std::string_view what, const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to) {
    if (innermost == nullptr || !innermost->options_.enable || from == to) return;
    if (!innermost->options_.strict && redistribution_cost(from, to) == 0) return;
    const std::string found = fmt::format(
        "{} of size {} as {} on {} is redistributed to {} by an op, expected a call of redistribute before it", what,
        shape_to_string(from.size()), to_string(from.placements()), mesh.to_string(), to_string(to.placements()));
    if (!innermost->options_.warn) fail(ErrorCode::invalid_argument, "explicit redistribution: {}", found);
    innermost->options_.warn(found);
  }
};

void check_explicit(std::string_view what, const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to) {
  ExplicitRedistributionCheck::check(what, mesh, from, to);
}

bool is_permitted_explicitly() { return ExplicitRedistributionCheck::is_permitted(); }

}  // namespace tessera
