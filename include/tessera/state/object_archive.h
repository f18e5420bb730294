#pragma once
/// \file
/// Converts a value to a torch.save archive, the form in which a checkpoint stores objects, and back.
///
/// Loading never executes pickled code. Law: load_object(save_object(v), name) == v for every value that save_object
/// accepts, except that the storages of an opaque object get other keys. Tensors that shared a storage share one again.
///
/// Loading understands None, bool, 64-bit int, float, str, bytes, list, tuple, dict and OrderedDict with string or int
/// keys (they become a Dict; other attributes of an OrderedDict are dropped), torch.Size (becomes a Tuple), and strided
/// tensors and parameters of the dtypes that this LibTorch has (they become tensors on the CPU, whatever their device
/// was). Any other object becomes an opaque object together with everything in it, storages included. It may occur
/// anywhere in the value, and no longer shares storages with the rest. See docs/formats/torch_archive.md.

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/base/bytes.h"
#include "tessera/base/file.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/state/value.h"

namespace tessera {

/// The depth of nesting up to which objects are saved and loaded.
inline constexpr std::size_t kMaxObjectDepth = 500;

/// Returns the complete archive, as torch.save writes it to a stream: the folder is named "archive" and the pickle has
/// protocol 2. Each tensor is saved as a plain tensor with its storage; a shared storage is saved once. PyTorch loads
/// the archive with weights_only=True unless it contains an opaque object. Equal values give equal bytes.
///
/// As in torch.save, the full storage is saved even if a tensor uses only a part of it. Elements are copied, from the
/// device if necessary.
///
/// Throws `Error(unsupported)` for values that an archive cannot hold: sharded tensors of any kind, checkpointables,
/// tensors that are not strided or have no storage, two tensors of different dtypes on one storage, and nesting deeper
/// than `kMaxObjectDepth`. Throws `Error(invalid_argument)` for text that is not UTF-8.
Bytes save_object(const Value& value);

/// Returns the value in an archive. Throws `Error(corrupt)`, and `Error(unsupported)`, e.g. for an unknown dtype.
/// \param name the archive's name in messages.
Value load_object(ByteView archive, const std::string& name);

/// Opens the file of a checkpoint with the given number.
using OpenFile = FunctionRef<std::shared_ptr<const ByteSource>(std::uint32_t file)>;
/// Returns the value of an object whose pickle has been read. Reads its storages and throws `Error(corrupt)` if a
/// checksum differs. The value owns its data; `object` and the files are not needed afterwards.
Value load_object(const checkpoint::ObjectValue& object, OpenFile open);
/// Returns object `i` of a checkpoint.
Value load_object(const checkpoint::Checkpoint& checkpoint, std::size_t i);

}  // namespace tessera
