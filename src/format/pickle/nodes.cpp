#include "format/pickle/nodes.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "tessera/base/internal/huge_pages.h"

namespace tessera::pickle {

namespace {

constexpr std::size_t kMappedBlockBytes = std::size_t{16} << 20;
constexpr std::size_t kLargeArrayBytes = std::size_t{64} << 10;

Fold fold_for(std::string_view module, std::string_view name) {
  if (module == "builtins") {
    if (name == "bytes") return Fold::bytes;
    if (name == "bytearray") return Fold::byte_array;
    if (name == "set") return Fold::set;
    if (name == "frozenset") return Fold::frozen_set;
  } else if (module == "_codecs") {
    if (name == "encode") return Fold::encode;
  } else if (module == "copyreg") {
    if (name == "__newobj__") return Fold::new_object;
    if (name == "__newobj_ex__") return Fold::new_object_ex;
  }
  return Fold::none;
}

}  // namespace

Nodes::~Nodes() {
  for (void* block : blocks_) std::free(block);
  for (void* block : mapped_blocks_) unmap_huge_pages(block, kMappedBlockBytes);
  for (const auto& [array, bytes] : large_arrays_) std::free(array);
}

void Nodes::reserve_bytes(std::uint64_t bytes) {
  if (bytes > limit_bytes_ || reserved_bytes_ > limit_bytes_ - bytes) throw Full();
  reserved_bytes_ += bytes;
}

void* Nodes::allocate_in_new_block(std::size_t bytes) {
  if (bytes >= kLargeArrayBytes) {  // a block of its own; the current one is not full yet
    reserve_bytes(bytes);
    return malloc_block(bytes);
  }
  const std::size_t size = std::max(next_block_bytes_, bytes);
  reserve_bytes(size);
  if (size < kMappedBlockBytes) {
    next_ = static_cast<std::uint8_t*>(malloc_block(size));
  } else {
    mapped_blocks_.push_back(nullptr);
    mapped_blocks_.back() = map_huge_pages(size);
    next_ = static_cast<std::uint8_t*>(mapped_blocks_.back());
  }
  end_ = next_ + size;
  next_block_bytes_ = std::min(2 * next_block_bytes_, kMappedBlockBytes);
  void* result = next_;
  next_ += bytes;
  return result;
}

void* Nodes::malloc_block(std::size_t bytes) {
  blocks_.push_back(nullptr);
  blocks_.back() = std::malloc(bytes);
  if (blocks_.back() == nullptr) throw std::bad_alloc();
  return blocks_.back();
}

void* Nodes::grow(void* items, std::uint32_t count, std::uint32_t& capacity, std::size_t more, std::size_t item_bytes) {
  if (more > UINT32_MAX - count) throw Full();
  const std::uint64_t wanted = std::max<std::uint64_t>(count + more, std::uint64_t{2} * capacity);
  const auto new_capacity = static_cast<std::uint32_t>(std::min<std::uint64_t>(wanted, UINT32_MAX));
  const std::uint64_t bytes = std::uint64_t{new_capacity} * item_bytes;
  void* result;
  if (bytes < kLargeArrayBytes) {
    result = allocate(bytes);
    if (count != 0) std::memcpy(result, items, count * item_bytes);
  } else {
    const auto old = large_arrays_.find(items);
    if (old == large_arrays_.end()) {
      reserve_bytes(bytes);
      result = std::malloc(bytes);
      if (result == nullptr) throw std::bad_alloc();
      if (count != 0) std::memcpy(result, items, count * item_bytes);
    } else {
      reserve_bytes(bytes - old->second);
      result = std::realloc(items, bytes);
      if (result == nullptr) throw std::bad_alloc();
      large_arrays_.erase(old);
    }
    large_arrays_.emplace(result, bytes);
  }
  capacity = new_capacity;
  return result;
}

NodeRef Nodes::long_tuple(const NodeRef* items, std::size_t count) {
  auto* node = static_cast<detail::TupleNode*>(allocate(sizeof(detail::TupleNode) + count * sizeof(NodeRef)));
  node->count = count;
  std::memcpy(static_cast<void*>(node + 1), items, count * sizeof(NodeRef));
  return pack(Kind::tuple, address(node));
}

NodeRef Nodes::global(std::string_view module, std::string_view name) {
  const GlobalName kept_name{as_text(kept(as_bytes(module))), as_text(kept(as_bytes(name)))};
  return pack(Kind::global, address(create<GlobalNode>({kept_name, fold_for(module, name)})));
}

Object::Extra& Nodes::extra(NodeRef object) {
  auto& node = change<Object>(object);
  if (node.extra_address == 0) node.extra_address = address(create<Object::Extra>({})) & 0xffff'ffff'ffff;
  return *reinterpret_cast<Object::Extra*>(static_cast<std::uint64_t>(node.extra_address));
}

NodeRef Nodes::object_with_keywords(NodeRef callable, NodeRef arguments, NodeRef keyword_arguments) {
  const NodeRef result = object(Object::Made::new_object_ex, callable, arguments);
  extra(result).keyword_arguments = keyword_arguments;
  return result;
}

void Nodes::add_state(NodeRef object, NodeRef state) {
  auto& node = change<Object>(object);
  auto& more = extra(object);
  const NodeRef first[] = {node.state};
  const std::span<const NodeRef> before = more.state_count == 0 ? std::span<const NodeRef>(first) : node.state.items();
  std::vector<NodeRef> all(before.begin(), before.end());
  all.push_back(state);
  node.state = tuple(all.data(), all.size());
  more.state_count = all.size();
}

}  // namespace tessera::pickle
