#include "tessera/base/internal/text_hash.h"

#include <random>

namespace tessera {

const HashKeys& hash_keys() {
  static const HashKeys keys = [] {
    std::random_device random;
    const auto number = [&] { return (std::uint64_t{random()} << 32) | random(); };
    const std::uint64_t start = number();
    return HashKeys{start, number() | 1};
  }();
  return keys;
}

}  // namespace tessera
