#pragma once
/// \file
/// A value as the torch.save archive that a checkpoint keeps of what is no sharded tensor, and back.
///
/// Nothing that was pickled is ever executed. Law: load_object(save_object(v), name) == v for every value that
/// save_object takes (but that the storages of an opaque object get other keys), and tensors that share a storage share
/// it again.
///
/// What is understood when loading: None, bool, int of 64 bits, float, str, bytes, list, tuple, dict and OrderedDict
/// with keys that are strings or ints (a Dict; what else was set on an OrderedDict is left out), torch.Size (a Tuple),
/// strided tensors and parameters of dtypes that the LibTorch here has (a tensor, on the CPU wherever it was). Anything
/// else is an opaque object, itself and all that is in it, storages included; it may stand anywhere among the rest.
/// What it shared with the rest it has for itself then. See docs/formats/torch_archive.md.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/base/bytes.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/state/value.h"

namespace tessera {

/// The archive, whole, as torch.save writes it into a stream: its folder is called "archive", its pickle is of protocol
/// 2, tensors are saved with their storages, those that share one with one, and each as a plain tensor. PyTorch loads
/// it with weights_only=True unless there is an opaque object in it. Equal values give equal bytes.
///
/// A storage is saved whole, also if a tensor has but a part of it, which is torch.save's way of keeping what is
/// shared. Elements are copied, from a device if they are there.
///
/// Throws `Error(unsupported)` for what has no place in an archive: a sharded tensor of any kind or a checkpointable, a
/// tensor that isn't strided or has no storage, two tensors of different dtypes on one storage, and for what nests
/// deeper than 500; `Error(invalid_argument)` for text that isn't UTF-8.
Bytes save_object(const Value& value);

/// The value in an archive. Throws `Error`: corrupt, unsupported (a dtype that is none of PyTorch's, ...).
/// \param name of the archive, for messages.
Value load_object(ByteView archive, const std::string& name);

/// Opens a file of a checkpoint, by its number there.
using OpenFile = std::function<std::shared_ptr<const ByteSource>(std::uint32_t file)>;
/// The value of an object whose pickle was read. Its storages are read, and their checksums compared: Error(corrupt).
/// The value owns all that it has; neither `object` nor the files are needed afterwards.
Value load_object(const checkpoint::ObjectValue& object, const OpenFile& open);
/// Object `i` of a checkpoint.
Value load_object(const checkpoint::Checkpoint& checkpoint, std::size_t i);

}  // namespace tessera
