// What is no checkpoint of a supported format is refused as what it is, by its bytes and whatever its name.

#include <gtest/gtest.h>

#include <string>

#include "support/error_matchers.h"
#include "support/paths.h"
#include "support/temporary_directory.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using namespace std::literals;

class ForeignTest : public ::testing::Test {
 protected:
  fs::path write(const fs::path& name, std::string_view text) const {
    fs::create_directories((directory_.path() / name).parent_path());
    write_new_file(directory_.path() / name, as_bytes(text));
    return directory_.path() / name;
  }
  fs::path directory() const { return directory_.path(); }

 private:
  testing::TemporaryDirectory directory_;
};

std::string padded(std::string_view text) { return std::string(text) + std::string(600, '\0'); }

TEST_F(ForeignTest, FilesAreRefusedAsWhatTheyAre) {
  struct Case {
    const char* name;
    std::string contents;
    const char* what;
  };
  // A local header of zip for an entry "arr_0.npy".
  const std::string npz = "PK\x03\x04\x14\0\0\0\0\0\0\0\0\0\0\0\0\0\x10\0\0\0\x10\0\0\0\x09\0\0\0arr_0.npy"s;
  const std::vector<Case> cases = {
      {"a.safetensors", padded("GGUF\x03\0\0\0"sv), "a GGUF file of llama.cpp"},
      {"b.pt", padded("\x89HDF\r\n\x1a\n"sv), "an HDF5 file"},
      {"c.bin", std::string(257, 'x') + "ustar" + std::string(300, '\0'),
       "a tar archive, expected a checkpoint of PyTorch or safetensors; unpack it first"},
      {"d.pt", padded("\x1f\x8b\x08"sv),
       "a packed file, expected a checkpoint of PyTorch or safetensors; unpack it first"},
      {"e.pt", padded("\x28\xb5\x2f\xfd"sv), "a packed file"},
      {"f.bin", padded("\x93NUMPY\x01\0"sv), "an array of NumPy"},
      {"g.pt", padded(npz), "an array of NumPy"},
      {"h.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"},
      {"i.bin", "<!DOCTYPE html><html></html>", "a web page"},
      {"j.bin", padded("\x08\x07\x12\x07pytorch\x1a\x03"), "a model of ONNX"},
      {"k.index", std::string(100, 'x') + "\x57\xfb\x80\x8b\x24\x75\x47\xdb", "a checkpoint of TensorFlow"},
      {"config.json", "{\n  \"hidden_size\": 4\n}\n", "a JSON text, expected a checkpoint"},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    EXPECT_ERROR(Checkpoint::open(write(one.name, one.contents)), ErrorCode::unsupported, one.name, one.what);
  }
}

TEST_F(ForeignTest, DirectoriesAreRefusedAsWhatTheyAre) {
  write("orbax/_CHECKPOINT_METADATA", "{}");
  write("orbax/default/manifest.ocdbt", "");
  write("saved/saved_model.pb", "");
  write("tf/model.index", "");
  write("tf/model.data-00000-of-00001", "");
  write("zarr/zarr.json", "{}");
  EXPECT_ERROR(Checkpoint::open(directory() / "orbax"), ErrorCode::unsupported, "a checkpoint of Orbax (JAX)");
  EXPECT_ERROR(Checkpoint::open(directory() / "orbax/default"), ErrorCode::unsupported, "Orbax");
  EXPECT_ERROR(Checkpoint::open(directory() / "saved"), ErrorCode::unsupported, "a SavedModel of TensorFlow");
  EXPECT_ERROR(Checkpoint::open(directory() / "tf"), ErrorCode::unsupported, "a checkpoint of TensorFlow");
  EXPECT_ERROR(Checkpoint::open(directory() / "zarr"), ErrorCode::unsupported, "a store of Zarr");
  EXPECT_ERROR(verify(directory() / "tf"), ErrorCode::unsupported, "a checkpoint of TensorFlow");
}

TEST_F(ForeignTest, UrlsAreRefusedWithWhatToDo) {
  EXPECT_ERROR(Checkpoint::open("s3://bucket/step-1"), ErrorCode::invalid_argument, "found a URL", "aws s3 cp");
  EXPECT_ERROR(Checkpoint::open("hf://a/b"), ErrorCode::invalid_argument, "found a URL", "hf download");
  EXPECT_ERROR(Checkpoint::open("https://a/b.pt"), ErrorCode::invalid_argument, "found a URL", "curl");
  EXPECT_ERROR(Checkpoint::open("x://a"), ErrorCode::invalid_argument, "copy the files");
  EXPECT_ERROR(verify("gs://a/b"), ErrorCode::invalid_argument, "gcloud storage cp -r");
  EXPECT_ERROR(Checkpoint::open("-"), ErrorCode::invalid_argument, "standard input and output", "expected a path");
  EXPECT_ERROR(Checkpoint::open(""), ErrorCode::invalid_argument,
               "the path is empty, expected the path of a checkpoint");
  EXPECT_ERROR(verify(""), ErrorCode::invalid_argument, "the path is empty, expected the path of a checkpoint");
  EXPECT_ERROR(Checkpoint::open("a b://c"), ErrorCode::not_found, "no such file");
  EXPECT_ERROR(Checkpoint::open("://c"), ErrorCode::not_found, "no such file");
}

TEST_F(ForeignTest, AFileOfACheckpointNamesTheDirectoryToPass) {
  const fs::path ck = fs::path(testing::source_dir()) / "tests/golden/demo/ck";
  EXPECT_ERROR(Checkpoint::open(ck / ".metadata"), ErrorCode::invalid_argument, "found a metadata file",
               "pass '" + ck.string() + "'");
  EXPECT_ERROR(Checkpoint::open(ck / "__0_0.distcp"), ErrorCode::invalid_argument, "found a data file",
               "pass '" + ck.string() + "'");
}

}  // namespace
}  // namespace tessera::checkpoint
