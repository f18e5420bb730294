#include <utility>

#include "tessera/base/error.h"
#include "tessera/checkpoint/transform.h"

namespace tessera::checkpoint {

TransformRegistry::TransformRegistry() {
  if (!has_zstd()) return;
  add("stream.zstd", [](const std::string& version) {
    if (version.substr(0, version.find('.')) != "1") {
      fail(ErrorCode::unsupported, "version '{}' of stream.zstd, expected 1", printable(version));
    }
    return zstd_transform();
  });
}

void TransformRegistry::add(const std::string& name, Create create) {
  creators_.insert_or_assign(name, std::move(create));
}

std::vector<TransformPtr> TransformRegistry::create(std::span<const std::string> descriptors) const {
  std::vector<TransformPtr> transforms;
  transforms.reserve(descriptors.size());
  for (const std::string& descriptor : descriptors) {
    const std::size_t slash = descriptor.find('/');
    const std::string name = descriptor.substr(0, slash);
    const auto found = creators_.find(name);
    if (found == creators_.end()) {
      fail(ErrorCode::unsupported,
           "stored with the transform '{}', which is not registered, expected a known one; register '{}' to undo it",
           printable(descriptor), printable(name));
    }
    transforms.push_back(found->second(slash == std::string::npos ? "" : descriptor.substr(slash + 1)));
    if (transforms.back() == nullptr) {
      fail(ErrorCode::invalid_argument, "the registered transform '{}' is null, expected a transform", printable(name));
    }
  }
  return transforms;
}

}  // namespace tessera::checkpoint
