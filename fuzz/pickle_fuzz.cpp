/// \file
/// Reads bytes as a pickle and uses the tree as the command does: prints it, converts it to JSON, and to the lossless
/// JSON and back, which must be equal. Writes it again in both protocols; the result must read as equal.

#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/format/pickle_reader.h"
#include "tessera/format/pickle_writer.h"
#include "tessera/format/python_value.h"

namespace {

using namespace tessera;
namespace pk = tessera::pickle;

constexpr pk::ReadLimits kReadLimits{.depth = 100, .items = 20'000, .memo = 20'000, .memory_bytes = 16 << 20};
// Calls of protocol 2 nest deeper in opcodes than the values that they make.
constexpr pk::ReadLimits kRereadLimits{.depth = 1000, .items = 2'000'000, .memo = 2'000'000, .memory_bytes = 256 << 20};
constexpr pk::WalkLimits kWalkLimits{.depth = 200, .nodes = 100'000};

// Returns whether `action` completed; false if it exceeded a limit or met a value that cannot be written. Any other
// error is a finding.
template <typename Action>
bool done(const Action& action) {
  try {
    action();
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::corrupt && error.code() != ErrorCode::unsupported) std::abort();
    return false;
  }
}

void print(pk::NodeRef value) {
  done([&] {
    if (pk::repr(value, 1000).size() > 1003) std::abort();
  });
  done([&] { pk::type_name(value); });
  done([&] { pk::opaque_reason(value); });
  done([&] { pk::to_json(value).dump(); });
}

void through_json(pk::NodeRef value) {
  std::optional<nlohmann::ordered_json> json;
  if (!done([&] { json = pk::to_lossless_json(value); }) || !json) return;
  const std::string text = json->dump();
  pk::Tree tree;
  pk::NodeRef again;
  if (!done([&] { again = pk::from_lossless_json(nlohmann::ordered_json::parse(text), tree); })) std::abort();
  bool is_equal = true;
  done([&] { is_equal = pk::equal(again, value, kWalkLimits); });
  if (!is_equal) std::abort();
}

void write_again(pk::NodeRef value, int protocol) {
  Bytes written;
  pk::Writer writer(written, protocol);
  if (!done([&] { writer.value(value, nullptr, kWalkLimits); })) return;
  writer.stop();
  const pk::ReadResult again = pk::read(ByteView(written), "written", kRereadLimits);
  if (again.length_bytes != written.size()) std::abort();
  // Protocol 2 reaches dotted names by calls of getattr, which remain calls.
  if (protocol == 2 && as_text(written).find("getattr") != std::string_view::npos) return;
  bool is_equal = true;
  done([&] { is_equal = pk::equal(again.tree.root(), value, kWalkLimits); });
  if (!is_equal) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::optional<pk::ReadResult> result;
  if (!done([&] { result = pk::read(ByteView(data, size), "input", kReadLimits); })) return 0;
  if (result->length_bytes > size) std::abort();
  const pk::NodeRef root = result->tree.root();
  print(root);
  through_json(root);
  write_again(root, 2);
  write_again(root, 4);
  return 0;
}
