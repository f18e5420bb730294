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
  static void check(const DTensor& from, const MeshLayout& to) {
    if (innermost == nullptr || !innermost->options_.enable || from.layout() == to) return;
    if (!innermost->options_.strict && redistribution_cost(from.layout(), to) == 0) return;
    const std::string what =
        fmt::format("{} is redistributed to {} by an op, expected a call of redistribute before it", from.to_string(),
                    to_string(to.placements()));
    if (!innermost->options_.warn) fail(ErrorCode::invalid_argument, "explicit redistribution: {}", what);
    innermost->options_.warn(what);
  }
};

void check_explicit(const DTensor& from, const MeshLayout& to) { ExplicitRedistributionCheck::check(from, to); }

}  // namespace tessera
