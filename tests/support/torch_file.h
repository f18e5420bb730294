#pragma once
// Makes torch.save files for tests: a dict of tensors that are views, with any strides, of storages.

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "support/temporary_directory.h"
#include "tessera/base/crc32.h"
#include "tessera/format/pickle_writer.h"
#include "tessera/format/torch_archive.h"

namespace tessera::testing {

struct TorchFile {
  std::vector<std::pair<std::string, torch_archive::TensorRef>> tensors;
  std::vector<Bytes> storages;  // the i-th has the key i

  // Adds a view of storage `storage`.
  void add(const std::string& name, DType dtype, std::size_t storage, std::int64_t offset,
           std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides) {
    torch_archive::TensorRef tensor;
    tensor.dtype = dtype;
    tensor.storage = {std::to_string(storage), "cpu", dtype, static_cast<std::int64_t>(storages[storage].size())};
    tensor.storage_offset = offset;
    tensor.sizes = std::move(sizes);
    tensor.strides = std::move(strides);
    tensors.emplace_back(name, std::move(tensor));
  }

  Bytes bytes() const {
    Bytes data_pkl;
    pickle::Writer writer(data_pkl, 2);
    writer.empty_dict();
    writer.mark();
    for (const auto& [name, tensor] : tensors) {
      writer.string(name);
      torch_archive::write_tensor(writer, tensor);
    }
    writer.set_items();
    writer.stop();
    std::vector<torch_archive::ArchiveLayout::Storage> planned;
    std::vector<std::uint32_t> crcs;
    for (std::size_t i = 0; i < storages.size(); ++i) {
      planned.push_back({std::to_string(i), storages[i].size()});
      crcs.push_back(crc32(storages[i]));
    }
    const torch_archive::ArchiveLayout layout("archive", std::move(data_pkl), std::move(planned));
    Bytes out;
    for (std::size_t i = 0; i < storages.size(); ++i) {
      append(out, layout.before_storage(i, crcs));
      append(out, storages[i]);
    }
    append(out, layout.trailer(crcs));
    return out;
  }
};

}  // namespace tessera::testing
