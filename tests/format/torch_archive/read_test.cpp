#include "tessera/format/torch_archive.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "format/torch_archive/support.h"
#include "support/error_matchers.h"
#include "tessera/base/crc32.h"

namespace tessera::torch_archive {
namespace {

namespace fs = std::filesystem;
using pickle::Kind;
using pickle::NodeRef;
using pickle::Tree;
using ::testing::ElementsAre;

// --- Helpers -------------------------------------------------------------------------------------------------------

// The value at a path of keys and indices joined by '/'.
NodeRef at_path(NodeRef value, const std::string& path) {
  if (path == ".") return value;
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find('/', begin), path.size());
    const std::string key = path.substr(begin, end - begin);
    const auto pairs = value.is(Kind::dict)     ? value.pairs()
                       : value.is(Kind::object) ? value.object().dict_items()
                                                : std::span<const pickle::Pair>();
    bool found = false;
    for (const pickle::Pair& pair : pairs) {
      if (pair.key.is_string(key) || (pair.key.is(Kind::integer) && std::to_string(pair.key.integer()) == key)) {
        value = pair.value;
        found = true;
        break;
      }
    }
    if (!found && (value.is(Kind::list) || value.is(Kind::tuple))) {
      value = value.items()[std::stoul(key)];
      found = true;
    }
    if (!found) ADD_FAILURE() << "no " << key << " of " << path;
    begin = end + 1;
  }
  return value;
}

// The elements of a tensor in row-major order, in hex.
std::string elements(const TensorRef& tensor, const Bytes& storage) {
  std::string hex;
  const std::int64_t size = dtype_size(tensor.dtype);
  std::int64_t count = 1;
  for (const std::int64_t n : tensor.sizes) count *= n;
  for (std::int64_t flat = 0; flat < count; ++flat) {
    std::int64_t rest = flat, element = tensor.storage_offset;
    for (std::size_t d = tensor.sizes.size(); d-- > 0;) {
      element += rest % tensor.sizes[d] * tensor.strides[d];
      rest /= tensor.sizes[d];
    }
    for (std::int64_t b = 0; b < size; ++b) {
      hex += fmt::format("{:02x}", storage.at(static_cast<std::size_t>(element * size + b)));
    }
  }
  return hex;
}

// An archive of these entries, "a/" before each name.
Bytes archive_of(const std::vector<std::pair<std::string, std::string>>& entries) {
  zip::Layout layout;
  Bytes out;
  std::vector<std::uint32_t> crcs;
  for (const auto& [name, text] : entries) {
    const std::size_t i = layout.add("a/" + name, text.size());
    append(out, layout.header(i));
    append(out, text);
    crcs.push_back(crc32(as_bytes(text)));
    append(out, layout.descriptor(i, crcs.back()));
  }
  append(out, layout.directory(crcs));
  return out;
}

// A call of _rebuild_tensor_v2 whose parts a test may spoil.
struct Call {
  Tree tree;
  NodeRef storage_class = tree.make_global("torch", "FloatStorage");
  NodeRef location = tree.make_string("cpu");
  NodeRef numel = tree.make_integer(10);
  NodeRef offset = tree.make_integer(0);
  NodeRef size, stride;
  NodeRef requires_grad = tree.make_boolean(false);
  std::vector<NodeRef> more;
  std::string_view function = "_rebuild_tensor_v2";

  Call() : size(ints({2, 5})), stride(ints({5, 1})) {}
  NodeRef ints(std::vector<std::int64_t> numbers) {
    std::vector<NodeRef> items;
    for (const std::int64_t number : numbers) items.push_back(tree.make_integer(number));
    return tree.make_tuple(items);
  }
  NodeRef reduce(std::string_view module, std::string_view name, std::vector<NodeRef> arguments) {
    return tree.make_object(pickle::Object::Made::reduce, tree.make_global(module, name), tree.make_tuple(arguments));
  }
  NodeRef storage() {
    const std::vector<NodeRef> id = {tree.make_string("storage"), storage_class, tree.make_string("0"), location,
                                     numel};
    return tree.make_persistent_id(tree.make_tuple(id));
  }
  std::vector<NodeRef> arguments() {
    std::vector<NodeRef> result = {storage(), offset,        size,
                                   stride,    requires_grad, reduce("collections", "OrderedDict", {})};
    result.insert(result.end(), more.begin(), more.end());
    return result;
  }
  NodeRef make() { return reduce("torch._utils", function, arguments()); }
};

// --- Reading PyTorch's files --------------------------------------------------------------------------------------

class TorchArchiveGoldenTest : public ::testing::TestWithParam<std::string> {};

TEST_P(TorchArchiveGoldenTest, EveryTensorIsReadAsPyTorchHasIt) {
  const Golden golden_file = golden(GetParam());
  const Archive archive = open_bytes(golden_file.file);
  EXPECT_EQ(archive.prefix, GetParam());
  EXPECT_EQ(archive.version, 3);
  for (const auto& [path, facts] : golden_file.expected.at("tensors").items()) {
    SCOPED_TRACE(path);
    const NodeRef value = at_path(archive.tree.root(), path);
    EXPECT_TRUE(is_tensor_like(value));
    const std::optional<TensorRef> tensor = as_tensor(value);
    ASSERT_TRUE(tensor);
    EXPECT_EQ(dtype_name(tensor->dtype), facts.at("dtype").get<std::string>());
    EXPECT_EQ(tensor->sizes, facts.at("shape").get<std::vector<std::int64_t>>());
    EXPECT_EQ(tensor->strides, facts.at("strides").get<std::vector<std::int64_t>>());
    if (!facts.at("bytes").get<std::string>().empty()) {
      EXPECT_EQ(tensor->storage_offset, facts.at("storage_offset").get<std::int64_t>());
    }
    EXPECT_EQ(tensor->requires_grad, facts.at("requires_grad").get<bool>());
    EXPECT_EQ(tensor->is_parameter, facts.at("parameter").get<bool>());
    EXPECT_EQ(tensor->storage.location, "cpu");
    const zip::Entry& entry = archive.storage_entry(tensor->storage);
    EXPECT_EQ(entry.size_bytes, static_cast<std::uint64_t>(tensor->storage.size_bytes));
    const Bytes storage = entry_bytes(archive, golden_file.file, "data/" + tensor->storage.key);
    EXPECT_EQ(crc32(storage), entry.crc32);
    EXPECT_EQ(elements(*tensor, storage), facts.at("bytes").get<std::string>());
  }
  for (const auto& path : golden_file.expected.at("others")) {
    SCOPED_TRACE(path);
    const NodeRef value = at_path(archive.tree.root(), path.get<std::string>());
    EXPECT_TRUE(is_tensor_like(value));
    EXPECT_FALSE(as_tensor(value));
  }
}

INSTANTIATE_TEST_SUITE_P(PyTorch, TorchArchiveGoldenTest,
                         ::testing::Values("2.6-dtypes", "2.6-views", "2.6-parameters", "2.6-state", "2.6-strange",
                                           "2.6-tensor", "2.6-no_tensor", "2.14-dtypes", "2.14-views",
                                           "2.14-parameters", "2.14-state", "2.14-strange", "2.14-tensor",
                                           "2.14-no_tensor"),
                         [](const auto& param) {
                           std::string name = param.param;
                           for (char& c : name) c = c == '.' || c == '-' ? '_' : c;
                           return name;
                         });

TEST(TorchArchiveReadTest, AnItemOfACheckpointOfPyTorch113IsRead) {
  const Bytes bytes = read_file(golden_directory().parent_path() / "checkpoints/1.13-sharded/ck/__0_0.distcp");
  const Archive archive = open_bytes(bytes);
  EXPECT_EQ(archive.prefix, "archive");
  ASSERT_TRUE(as_tensor(archive.tree.root()));
  EXPECT_NO_THROW(archive.storage_entry(as_tensor(archive.tree.root())->storage));
}

TEST(TorchArchiveReadTest, AZipThatAnotherToolMadeOfAnArchiveIsRead) {
  for (const char* name : {"python-stored.zip", "python-zip64.zip", "python-piped.zip", "python-piped-zip64.zip"}) {
    EXPECT_EQ(as_tensor(open_bytes(read_file(golden_directory() / name)).tree.root())->sizes,
              std::vector<std::int64_t>{5})
        << name;
  }
}

TEST(TorchArchiveReadTest, FilesThatOnlyLookAlikeSayWhatTheyAre) {
  for (const std::string version : {"2.6", "2.14"}) {
    const Bytes legacy = read_file(golden_directory() / (version + "-legacy.pth"));
    EXPECT_TRUE(looks_like_legacy(legacy));
    EXPECT_ERROR(open_bytes(legacy), ErrorCode::unsupported, "mem.pt",
                 "before PyTorch 1.6, expected a zip; load and save it again");
    EXPECT_ERROR(open_bytes(read_file(golden_directory() / (version + "-script.ts"))), ErrorCode::unsupported,
                 "TorchScript");
  }
  EXPECT_FALSE(looks_like_legacy(as_bytes(kNonePickle)));
  EXPECT_ERROR(open_bytes(archive_of({{"data.pkl", std::string(kNonePickle)}, {"constants.pkl", ""}})),
               ErrorCode::unsupported, "mem.pt", "TorchScript");
  EXPECT_ERROR(open_bytes(archive_of({{"readme", "hello"}})), ErrorCode::unsupported, "'a/data.pkl'");
  EXPECT_ERROR(open_bytes(to_bytes("hello")), ErrorCode::corrupt, "mem.pt", "byte 0",
               "expected the start of a torch.save archive");
  EXPECT_ERROR(open_bytes({}), ErrorCode::corrupt, "mem.pt");
}

TEST(TorchArchiveReadTest, SmallEntriesAreChecked) {
  const std::string pkl(kNonePickle);
  EXPECT_NO_THROW(open_bytes(archive_of({{"data.pkl", pkl}, {"version", "3\n"}})));
  EXPECT_NO_THROW(open_bytes(archive_of({{"data.pkl", pkl}, {"version", "3"}, {"byteorder", "little"}})));
  EXPECT_ERROR(open_bytes(archive_of({{"data.pkl", pkl}})), ErrorCode::corrupt,
               "no entry 'a/version', expected one with its version");
  EXPECT_ERROR(open_bytes(archive_of({{"data.pkl", pkl}, {"version", "x"}})), ErrorCode::corrupt, "'x'",
               "expected a number");
  EXPECT_ERROR(open_bytes(archive_of({{"data.pkl", pkl}, {"version", "11"}})), ErrorCode::unsupported, "version 11");
  EXPECT_ERROR(open_bytes(archive_of({{"data.pkl", pkl}, {"version", "3"}, {"byteorder", "big"}})),
               ErrorCode::unsupported, "big-endian");
  EXPECT_ERROR(open_bytes(archive_of({{"data.pkl", pkl}, {"version", "3"}, {"byteorder", "middle"}})),
               ErrorCode::corrupt, "'a/byteorder'", "'middle'");
  EXPECT_ERROR(open_bytes(archive_of({{"data.pkl", pkl}, {"version", std::string(5000, '1')}})), ErrorCode::corrupt,
               "5000 bytes", "expected at most 4096");
}

TEST(TorchArchiveReadTest, AChecksumThatIsWrongNamesEntryAndOffset) {
  Bytes bytes = read_file(golden_directory() / "2.6-tensor.pt");
  bytes[64] ^= 0x80;
  EXPECT_ERROR(open_bytes(bytes), ErrorCode::corrupt, "mem.pt", "'2.6-tensor/data.pkl' at byte 64", "CRC-32");
  bytes[64] ^= 0x80;
  const std::string id = "2.6-tensor/.data/serialization_id";
  bytes[open_bytes(bytes).directory.find(id)->data_offset_bytes] ^= 1;
  EXPECT_ERROR(open_bytes(bytes), ErrorCode::corrupt, "mem.pt", id, "CRC-32");
}

TEST(TorchArchiveReadTest, BytesBehindThePickleAreRefused) {
  EXPECT_ERROR(open_bytes(archive_of({{"data.pkl", std::string(kNonePickle) + "more"}, {"version", "3"}})),
               ErrorCode::corrupt, "'a/data.pkl'", "4 bytes after the end of the pickle");
}

TEST(TorchArchiveReadTest, AnErrorInThePickleSaysWhereInTheFile) {
  const Bytes bytes = archive_of({{"data.pkl", "\x80\x02\xff."}, {"version", "3"}});
  EXPECT_ERROR(open_bytes(bytes), ErrorCode::corrupt, "mem.pt", "66");
}

TEST(TorchArchiveReadTest, APickleLargerThanTheLimitIsNotRead) {
  OpenLimits limits;
  limits.pickle_bytes = 100;
  EXPECT_ERROR(open_bytes(read_file(golden_directory() / "2.6-tensor.pt"), limits), ErrorCode::corrupt,
               "expected at most 100");
}

TEST(TorchArchiveReadTest, AStorageMustBeThereAndLargeEnough) {
  const Archive archive = open_bytes(read_file(golden_directory() / "2.6-tensor.pt"));
  StorageRef storage = as_tensor(archive.tree.root())->storage;
  EXPECT_EQ(archive.storage_entry(storage).size_bytes, 20u);
  storage.size_bytes = 21;
  EXPECT_ERROR(archive.storage_entry(storage), ErrorCode::corrupt, "mem.pt", "data/0",
               "20 bytes, expected at least 21");
  storage.key = "../0";
  EXPECT_ERROR(archive.storage_entry(storage), ErrorCode::corrupt,
               "no entry '2.6-tensor/data/../0', expected one of at least 21 bytes for a storage");
}

// --- Calls -------------------------------------------------------------------------------------------------------

TEST(AsTensorTest, AWellFormedCallIsATensor) {
  Call call;
  const std::optional<TensorRef> tensor = as_tensor(call.make());
  ASSERT_TRUE(tensor);
  EXPECT_THAT(tensor->sizes, ElementsAre(2, 5));
  EXPECT_EQ(tensor->storage.size_bytes, 40);
  EXPECT_EQ(tensor->storage.dtype, DType::float32);
}

TEST(AsTensorTest, ElementsBehindTheStorageAreRefused) {
  Call call;
  call.offset = call.tree.make_integer(1);
  EXPECT_ERROR(as_tensor(call.make()), ErrorCode::corrupt, "up to byte 44",
               "storage '0', expected them within its 40 bytes");
  Call strided;
  strided.stride = strided.ints({6, 1});
  EXPECT_ERROR(as_tensor(strided.make()), ErrorCode::corrupt, "up to byte 44");
  Call expanded;
  expanded.size = expanded.ints({1'000'000'000'000, 10});
  expanded.stride = expanded.ints({0, 1});
  EXPECT_TRUE(as_tensor(expanded.make()));
}

TEST(AsTensorTest, NumbersThatOverflowAreRefused) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  const std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>> cases = {
      {{kHuge, 2}, {0, 0}}, {{2, 2}, {kHuge, kHuge}}, {{kHuge}, {kHuge}}, {{0, kHuge, 4}, {1, 1, 1}}, {{kHuge}, {0}},
  };
  for (const auto& [size, stride] : cases) {
    Call call;
    call.size = call.ints(size);
    call.stride = call.ints(stride);
    EXPECT_ERROR(as_tensor(call.make()), ErrorCode::corrupt, "overflows");
  }
  // Without elements nothing is computed from strides.
  Call empty;
  empty.size = empty.ints({0, 0, 0});
  empty.stride = empty.ints({kHuge, kHuge, 1});
  EXPECT_TRUE(as_tensor(empty.make()));
  Call offset;
  offset.offset = offset.tree.make_integer(INT64_MAX);
  EXPECT_ERROR(as_tensor(offset.make()), ErrorCode::corrupt, "overflows");
  Call storage;
  storage.numel = storage.tree.make_integer(kHuge);
  EXPECT_ERROR(as_tensor(storage.make()), ErrorCode::corrupt, "tensor in data.pkl: size of a storage overflows");
}

TEST(AsTensorTest, MalformedArgumentsAreRefused) {
  const auto spoiled = [](auto spoil) {
    Call call;
    spoil(call);
    as_tensor(call.make());
  };
  EXPECT_ERROR(spoiled([](Call& c) {
                 c.size = c.ints({-1, 5});
               }),
               ErrorCode::corrupt, "size of dimension 0 is -1, expected 0 or more");
  EXPECT_ERROR(spoiled([](Call& c) { c.stride = c.ints({5, -1}); }), ErrorCode::corrupt, "stride of dimension 1 is -1");
  EXPECT_ERROR(spoiled([](Call& c) { c.stride = c.ints({5}); }), ErrorCode::corrupt,
               "2 sizes and 1 strides, expected a stride for each size");
  EXPECT_ERROR(spoiled([](Call& c) { c.offset = c.tree.make_integer(-1); }), ErrorCode::corrupt,
               "storage offset -1, expected 0 or more");
  EXPECT_ERROR(spoiled([](Call& c) { c.offset = NodeRef(); }), ErrorCode::corrupt, "storage offset is a",
               "expected an int");
  EXPECT_ERROR(spoiled([](Call& c) { c.size = c.tree.make_list(); }), ErrorCode::corrupt, "size is a list");
  EXPECT_ERROR(spoiled([](Call& c) { c.numel = c.tree.make_integer(-1); }), ErrorCode::corrupt,
               "-1 elements, expected 0 or more");
  EXPECT_ERROR(spoiled([](Call& c) { c.requires_grad = c.tree.make_integer(1); }), ErrorCode::corrupt, "requires_grad");
  EXPECT_ERROR(spoiled([](Call& c) { c.function = "_rebuild_tensor_v3"; }), ErrorCode::corrupt,
               "6 arguments, expected at least 7");
  EXPECT_ERROR(spoiled([](Call& c) {
                 c.more = {NodeRef(), NodeRef()};
               }),
               ErrorCode::corrupt, "8 arguments, expected at most 7");
}

// A pickle may refer to a tensor many times, and each time it is read.
TEST(AsTensorTest, WhatIsReadOfOneTensorIsLimited) {
  const auto with_dimensions = [](std::size_t count, auto change) {
    Call call;
    call.size = call.ints(std::vector<std::int64_t>(count, 1));
    call.stride = call.size;
    change(call);
    return as_tensor(call.make());
  };
  EXPECT_EQ(with_dimensions(1000, [](Call&) {})->sizes.size(), 1000u);
  EXPECT_ERROR(with_dimensions(1001, [](Call&) {}), ErrorCode::corrupt,
               "size has 1001 dimensions, expected at most 1000");
  EXPECT_FALSE(with_dimensions(1001, [](Call& c) { c.storage_class = c.tree.make_global("torch", "QInt8Storage"); }))
      << "it is known before its sizes are read that they are not";
  EXPECT_FALSE(with_dimensions(1001, [](Call& c) {
    c.function = "_rebuild_tensor_v3";
    c.more = {c.tree.make_global("torch", "of_the_future")};
  }));
  EXPECT_ERROR(with_dimensions(1, [](Call& c) { c.location = c.tree.make_string(std::string(1001, 'x')); }),
               ErrorCode::corrupt, "a storage whose key or location has 1001 bytes, expected at most 1000");
}

TEST(AsTensorTest, AnEmptyTensorMayBeginBehindItsStorage) {
  Call call;
  call.size = call.ints({0, 5});
  call.offset = call.tree.make_integer(11);
  EXPECT_EQ(as_tensor(call.make())->storage_offset, 0);
  Call at_end;
  at_end.size = at_end.ints({0, 5});
  at_end.offset = at_end.tree.make_integer(10);
  EXPECT_EQ(as_tensor(at_end.make())->storage_offset, 10);
}

TEST(AsTensorTest, AStorageOfAnotherKindIsNotATensor) {
  Call quantized;
  quantized.storage_class = quantized.tree.make_global("torch", "QInt8Storage");
  EXPECT_FALSE(as_tensor(quantized.make()));
  Call unknown;
  unknown.storage_class = unknown.tree.make_global("torch", "FutureStorage");
  EXPECT_FALSE(as_tensor(unknown.make()));
  Call foreign;
  foreign.storage_class = foreign.tree.make_global("evil", "FloatStorage");
  EXPECT_FALSE(as_tensor(foreign.make()));
  EXPECT_TRUE(is_tensor_like(foreign.make()));
}

TEST(AsTensorTest, AViewWithMetadataIsNotItsBytes) {
  Call call;
  call.more = {call.tree.make_dict()};
  EXPECT_TRUE(as_tensor(call.make())) << "no bit is set";
  const std::vector<NodeRef> pair = {call.tree.make_string("conj"), call.tree.make_boolean(true)};
  call.tree.set_items(call.more[0], pair);
  EXPECT_FALSE(as_tensor(call.make()));
}

TEST(AsTensorTest, WrappersAreLookedInto) {
  Call call;
  const NodeRef parameter =
      call.reduce("torch._utils", "_rebuild_parameter", {call.make(), call.tree.make_boolean(true), NodeRef()});
  ASSERT_TRUE(as_tensor(parameter));
  EXPECT_TRUE(as_tensor(parameter)->requires_grad);
  EXPECT_TRUE(as_tensor(parameter)->is_parameter);
  EXPECT_ERROR(as_tensor(call.reduce("torch._utils", "_rebuild_parameter", {call.make()})), ErrorCode::corrupt,
               "a parameter of 1 arguments, expected at least 2");
  const auto from_type = [&](NodeRef type) {
    return call.reduce("torch._tensor", "_rebuild_from_type_v2",
                       {call.tree.make_global("torch._utils", "_rebuild_tensor_v2"), type,
                        call.tree.make_tuple(call.arguments()), call.tree.make_dict()});
  };
  EXPECT_TRUE(as_tensor(from_type(call.tree.make_global("torch", "Tensor"))));
  EXPECT_FALSE(as_tensor(from_type(call.tree.make_global("mine", "Masked"))));
  EXPECT_TRUE(is_tensor_like(from_type(call.tree.make_global("mine", "Masked"))));
  const auto from_cpu = [&](std::string_view dtype) {
    return call.reduce("torch._utils", "_rebuild_device_tensor_from_cpu_tensor",
                       {call.make(), call.tree.make_global("torch", dtype), call.tree.make_string("xla:0"),
                        call.tree.make_boolean(true)});
  };
  EXPECT_TRUE(as_tensor(from_cpu("float32"))->requires_grad);
  EXPECT_FALSE(as_tensor(from_cpu("bfloat16"))) << "the bytes are of another dtype";
}

TEST(AsTensorTest, AParameterOfAParameterWithoutEndIsNotFollowed) {
  Call call;
  NodeRef value = call.make();
  for (int i = 0; i < 100'000; ++i) {
    value = call.reduce("torch._utils", "_rebuild_parameter", {value, call.tree.make_boolean(true), NodeRef()});
  }
  EXPECT_FALSE(as_tensor(value));
}

TEST(IsTensorLikeTest, CallsOfEveryKindOfTensorAreRecognisedAndNothingElse) {
  Call call;
  for (const std::string_view name :
       {"_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_meta_tensor_no_storage", "_rebuild_wrapper_subclass",
        "_rebuild_nested_tensor", "_rebuild_device_tensor_from_numpy", "_rebuild_xla_tensor"}) {
    EXPECT_TRUE(is_tensor_like(call.reduce("torch._utils", name, {}))) << name;
    EXPECT_FALSE(as_tensor(call.reduce("torch._utils", name, {}))) << name;
  }
  EXPECT_FALSE(is_tensor_like(call.reduce("collections", "OrderedDict", {})));
  EXPECT_FALSE(is_tensor_like(call.reduce("torch", "device", {})));
  EXPECT_FALSE(is_tensor_like(call.storage()));
  EXPECT_FALSE(is_tensor_like(NodeRef()));
}

// A call that makes a DTensor of shape [4, 5] on a mesh of two ranks, whose parts a test may spoil.
struct DTensorCall {
  using Attributes = std::vector<std::pair<std::string_view, NodeRef>>;
  Call call;
  NodeRef placement, mesh;
  Attributes more_of_spec;

  DTensorCall() {
    placement = instance("Shard", {{"dim", call.tree.make_integer(0)}});
    more_of_spec = {{"tensor_meta", call.reduce("torch.distributed.tensor", "TensorMeta", {call.ints({4, 5})})}};
    set_mesh(call.ints({2}), call.ints({0}));
  }
  void set_mesh(NodeRef shape, NodeRef coordinates) {
    mesh = instance("DeviceMesh",
                    {{"_layout", instance("_MeshLayout", {{"shape", shape}})}, {"_coordinate_on_dim", coordinates}});
  }
  NodeRef dict(const Attributes& attributes) {
    std::vector<NodeRef> all;
    for (const auto& [name, value] : attributes) {
      all.push_back(call.tree.make_string(name));
      all.push_back(value);
    }
    const NodeRef result = call.tree.make_dict();
    call.tree.set_items(result, all);
    return result;
  }
  NodeRef instance(std::string_view name, const Attributes& attributes) {
    const NodeRef object = call.reduce("torch.distributed.tensor", name, {});
    call.tree.set_state(object, dict(attributes));
    return object;
  }
  DTensorRef read() {
    const std::vector<NodeRef> placements = {placement};
    Attributes spec = {{"mesh", mesh}, {"placements", call.tree.make_tuple(placements)}};
    spec.insert(spec.end(), more_of_spec.begin(), more_of_spec.end());
    const NodeRef state = dict({{"_local_tensor", call.make()}, {"_spec", instance("DTensorSpec", spec)}});
    const NodeRef value =
        call.reduce("torch._tensor", "_rebuild_from_type_v2",
                    {call.tree.make_global("torch._utils", "_rebuild_wrapper_subclass"),
                     call.tree.make_global("torch.distributed.tensor", "DTensor"), call.tree.make_tuple({}), state});
    return as_dtensor(value).value();
  }
};

TEST(AsDTensorTest, MalformedPartsAreRefused) {
  const auto spoiled = [](auto spoil) {
    DTensorCall call;
    spoil(call);
    return call.read();
  };
  EXPECT_THAT(spoiled([](DTensorCall&) {}).mesh_shape, ElementsAre(2));
  EXPECT_ERROR(spoiled([](DTensorCall& c) { c.placement = c.instance("Shard", {}); }), ErrorCode::corrupt,
               "DTensor in data.pkl: a Shard with no dim, expected an int");
  EXPECT_ERROR(spoiled([](DTensorCall& c) {
                 const NodeRef zero = c.call.tree.make_integer(0);
                 c.placement = c.instance("_StridedShard", {{"dim", zero}, {"split_factor", zero}});
               }),
               ErrorCode::corrupt, "a _StridedShard with split_factor 0, expected an int of at least 1");
  EXPECT_ERROR(spoiled([](DTensorCall& c) { c.mesh = c.instance("DeviceMesh", {}); }), ErrorCode::unsupported,
               "without mesh and _layout, expected one of these");
  EXPECT_ERROR(spoiled([](DTensorCall& c) { c.set_mesh(c.call.ints({0}), c.call.ints({0})); }), ErrorCode::corrupt,
               "a mesh with the length 0, expected an int of at least 1");
  EXPECT_ERROR(spoiled([](DTensorCall& c) { c.set_mesh(c.call.ints({2}), c.call.ints({2})); }), ErrorCode::corrupt,
               "the coordinate [2] in a mesh of shape [2], expected one inside of it");
  EXPECT_ERROR(spoiled([](DTensorCall& c) { c.more_of_spec.clear(); }), ErrorCode::corrupt,
               "it has no tensor_meta, expected a _spec with mesh");
}

TEST(AsDTensorTest, AMeshOfNestedTuplesIsTheProductOfTheirLengths) {
  DTensorCall call;
  const NodeRef nested[] = {call.call.tree.make_integer(2), call.call.ints({3, 4})};
  const NodeRef lengths[] = {call.call.tree.make_tuple(nested)};
  call.set_mesh(call.call.tree.make_tuple(lengths), call.call.ints({23}));
  EXPECT_THAT(call.read().mesh_shape, ElementsAre(24));
}

// Without a limit these are 100^9 lengths, and a million attributes for each that is looked up.
TEST(AsDTensorTest, WhatAMeshSharesIsLimited) {
  DTensorCall shared;
  NodeRef lengths = shared.call.tree.make_integer(1);
  for (int depth = 0; depth < 9; ++depth) {
    lengths = shared.call.tree.make_tuple(std::vector<NodeRef>(100, lengths));
  }
  shared.set_mesh(shared.call.tree.make_tuple({&lengths, 1}), shared.call.ints({0}));
  EXPECT_ERROR(shared.read(), ErrorCode::corrupt, "a mesh of more lengths than the limit, expected at most 1000");
  DTensorCall crowded;
  crowded.more_of_spec.resize(300, {"junk", NodeRef()});
  EXPECT_ERROR(crowded.read(), ErrorCode::corrupt, "an object of 302 attributes, expected at most 250");
  DTensorCall flat;
  const NodeRef shape = flat.call.ints(std::vector<std::int64_t>(1001, 1));
  flat.more_of_spec = {{"tensor_meta", flat.call.reduce("torch.distributed.tensor", "TensorMeta", {shape})}};
  EXPECT_ERROR(flat.read(), ErrorCode::corrupt, "its shape has 1001 dimensions, expected at most 1000");
}

TEST(AsStorageTest, OtherPersistentIdsAreNoStorage) {
  Call call;
  EXPECT_FALSE(as_storage(NodeRef()));
  EXPECT_FALSE(as_storage(call.ints({1, 2, 3, 4, 5})));
  const std::vector<NodeRef> bad_key = {call.tree.make_string("storage"), call.storage_class, NodeRef(),
                                        call.tree.make_string("cpu"), call.numel};
  EXPECT_ERROR(as_storage(call.tree.make_tuple(bad_key)), ErrorCode::corrupt, "expected two strings");
}

TEST(StorageClassTest, NamesAndDtypesBelongTogether) {
  std::size_t typed = 0;
  for (std::size_t i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (const auto name = storage_class(dtype)) {
      ++typed;
      EXPECT_EQ(dtype_of_storage_class(*name), dtype);
    }
  }
  EXPECT_EQ(typed, 17u);
  EXPECT_FALSE(storage_class(DType::float8_e4m3fn));
  EXPECT_FALSE(dtype_of_storage_class("UntypedStorage"));
}

}  // namespace
}  // namespace tessera::torch_archive
