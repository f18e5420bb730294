#include "tessera/state/replica.h"

#include <exception>
#include <utility>

#include "state/transport/portable_state.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/state/object_archive.h"
#include "tessera/state/transport.h"

namespace tessera {

namespace {

// The copies go from rank r to rank r + step, which is a circle of ranks or several of them.
int step_of(const ProcessGroup& group) { return group.size() - group.size() / 2; }

int moved(const ProcessGroup& group, int steps) {
  const auto size = static_cast<std::int64_t>(group.size());
  const std::int64_t rank = (group.rank() + static_cast<std::int64_t>(steps) * step_of(group)) % size;
  return static_cast<int>(rank < 0 ? rank + size : rank);
}

// Every second rank of a circle sends first, so that no ranks wait for each other in a circle. Does both even if one of
// them throws, since another rank waits for each, and then rethrows the first exception.
void in_turns(const ProcessGroup& group, FunctionRef<void()> send, FunctionRef<void()> receive) {
  int place = 0;  // of this rank in its circle, counted from its lowest rank
  int lowest = 0;
  for (int steps = 0, rank = group.rank(); steps < group.size(); ++steps, rank = moved(group, -steps)) {
    if (steps > 0 && rank == group.rank()) break;
    if (steps == 0 || rank < lowest) {
      lowest = rank;
      place = steps;
    }
  }
  const bool sends_first = place % 2 == 0;
  std::exception_ptr failure;
  for (const auto& f : {sends_first ? send : receive, sends_first ? receive : send}) {
    try {
      f();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

Bytes to_archive(const StateDict& state) {
  const PortableState portable = take_apart(state);
  List parts;
  std::size_t next = 0;
  StateDict values = map_leaves(portable.state, [&](std::size_t position, const Path&, const Value& leaf) -> Value {
    if (next == portable.tensors.size() || portable.tensors[next].position != position) return leaf;
    const TensorLeaf& tensor = portable.tensors[next++];
    if (tensor.is_plain) return value_of(tensor);
    List elements;
    for (const auto& [box, chunk] : tensor.local.chunks) elements.push_back(chunk);
    parts.push_back(Tuple{describe(tensor), std::move(elements)});
    return nullptr;
  });
  return save_object(Dict{{"state", std::move(values)}, {"parts", std::move(parts)}});
}

StateDict from_archive(ByteView archive, const std::string& name) {
  const Value loaded = load_object(archive, name);
  const List& parts = loaded.get<Dict>().at("parts").get<List>();
  std::size_t next = 0;
  std::optional<TensorLeaf> part;
  const auto read_next = [&] {
    part.reset();
    if (next == parts.size()) return;
    const Tuple& members = parts[next++].get<Tuple>();
    part = described_leaf(members.at(0));
    std::size_t chunk = 0;
    for (auto& [box, tensor] : part->local.chunks) {
      tensor = members.at(1).get<List>().at(chunk++).get<at::Tensor>();
      if (tensor.sizes() == at::IntArrayRef(box.sizes)) continue;
      fail(ErrorCode::corrupt, "{}: a tensor of shape {}, expected that of {}", name,
           shape_to_string(tensor.sizes().vec()), to_string(box));
    }
  };
  read_next();
  return map_leaves(loaded.get<Dict>().at("state").get<Dict>(),
                    [&](std::size_t position, const Path&, const Value& leaf) -> Value {
                      if (!part || part->position != position) return leaf;
                      Value value = value_of(*part);
                      read_next();
                      return value;
                    });
}

void write_atomically(checkpoint::Storage& storage, const std::string& name, ByteView bytes) {
  storage.prepare();
  const std::string partial = name + ".tmp";
  storage.remove(partial);
  const std::unique_ptr<checkpoint::OutputFile> file = storage.create(partial, bytes.size());
  file->write_at(0, bytes);
  file->finish();
  storage.rename(partial, name);
  storage.sync();
}

}  // namespace

Replica::Replica(const ProcessGroup& group, std::shared_ptr<checkpoint::Storage> storage)
    : group_(group), storage_(std::move(storage)) {
  rejoin(group);
}

int Replica::keeps() const { return moved(group_, -1); }
int Replica::keeper() const { return moved(group_, 1); }
const StateDict* Replica::copy() const { return copy_ ? &*copy_ : nullptr; }

std::string Replica::file_name() const { return fmt::format("rank_{}_replica_partner_{}.pt", group_.rank(), keeps()); }

void Replica::update(const StateDict& state) {
  group_.check_call("update a Replica", [](CallArguments&) {});
  StateDict received = group_.agree_on("update a Replica", [&] {
    StateDict from_partner;
    in_turns(
        group_, [&] { send_state_dict(state, {keeper()}, group_); },
        [&] { from_partner = receive_state_dict(keeps(), group_); });
    if (storage_) write_atomically(*storage_, file_name(), to_archive(from_partner));
    return from_partner;
  });
  copy_ = std::move(received);
}

void Replica::rejoin(const ProcessGroup& group) {
  group.check_call("join a group with a Replica", [&](CallArguments& arguments) {
    if (group.size() == 1) {
      fail(ErrorCode::invalid_argument, "the group has one rank, expected another one that keeps a copy");
    }
    if (group.rank() != group_.rank() || group.size() != group_.size()) {
      fail(ErrorCode::invalid_argument, "this is rank {} of {}, expected rank {} of {} as before", group.rank(),
           group.size(), group_.rank(), group_.size());
    }
    arguments.add("storage", storage_ ? "given" : "null");
  });
  group_ = group;
}

void Replica::restore(StateDict& state, bool has_lost_it) {
  group_.check_call("restore from a Replica", [](CallArguments&) {});
  const std::vector<Bytes> lost = group_.all_gather_bytes(Bytes{static_cast<std::uint8_t>(has_lost_it ? 1 : 0)});
  const bool is_asked = lost[static_cast<std::size_t>(keeps())].at(0) != 0;
  std::optional<StateDict> read;
  group_.agree_on("restore from a Replica", [&] {
    if (!is_asked || copy_) return;
    if (!storage_ || !storage_->size_bytes(file_name())) {
      fail(ErrorCode::not_found, "no copy of the state of rank {} in memory{}, expected one", keeps(),
           storage_ ? " and no file " + storage_->name_of(file_name()) : std::string());
    }
    const std::shared_ptr<const ByteSource> file = storage_->open(file_name());
    read = from_archive(read_all(*file), file->name());
  });
  group_.agree_on("restore from a Replica", [&] {
    in_turns(
        group_,
        [&] {
          if (is_asked) send_state_dict(copy_ ? *copy_ : *read, {keeps()}, group_);
        },
        [&] {
          if (has_lost_it) receive_state_dict_into(state, keeper(), group_);
        });
  });
}

}  // namespace tessera
