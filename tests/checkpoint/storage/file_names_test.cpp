#include "tessera/checkpoint/internal/file_names.h"

#include <gtest/gtest.h>

namespace tessera::checkpoint {
namespace {

TEST(FileNamesTest, WhatIsWrittenIsParsed) {
  for (const DataFileName& name :
       {DataFileName{0, 0, 0}, DataFileName{12, 3, 0}, DataFileName{12345, 67, 8}, DataFileName{0, 0, 123456789012}}) {
    EXPECT_EQ(parse_data_file_name(to_string(name)), name) << to_string(name);
  }
  EXPECT_EQ(to_string(DataFileName{3, 1, 0}), "__3_1.distcp");
  EXPECT_EQ(to_string(DataFileName{3, 1, 2}), "__3_1.2.distcp");
}

TEST(FileNamesTest, OtherNamesAreNone) {
  for (const char* name :
       {"", "__", "__0.distcp", "_0_0.distcp", "__0_0.distcp2", "__0_0.0.distcp", "__00_0.distcp", "__0_0..distcp",
        "__-1_0.distcp", "__0_0.1.2.distcp", "a__0_0.distcp", "__0_0.safetensors", "__99999999999999999999_0.distcp"}) {
    EXPECT_EQ(parse_data_file_name(name), std::nullopt) << name;
  }
}

TEST(FileNamesTest, MetadataOfARank) {
  EXPECT_EQ(parse_rank_metadata_name("__12.metadata"), 12);
  for (const char* name :
       {".metadata", "__.metadata", "__1.metadata.tmp", "__01.metadata", "__-1.metadata", "1.metadata"}) {
    EXPECT_EQ(parse_rank_metadata_name(name), std::nullopt) << name;
  }
}

TEST(FileNamesTest, FilesAreCalledOtherwiseUntilTheyAreCommitted) {
  for (const std::string& name :
       {std::string("shard-00001-model-00001-of-00001.safetensors"), std::string(".metadata")}) {
    EXPECT_EQ(to_string(UncommittedName{name, 0}), name + ".tmp");
    EXPECT_EQ(to_string(UncommittedName{name, 12}), name + ".12.tmp");
    for (const std::int64_t generation : {0, 1, 12}) {
      const UncommittedName uncommitted{name, generation};
      EXPECT_EQ(parse_uncommitted_name(to_string(uncommitted)), uncommitted);
    }
    for (const char* end : {"", ".tmp.tmp", ".0.tmp", ".01.tmp", ".1.1.tmp", ".x.tmp"}) {
      EXPECT_EQ(parse_uncommitted_name(name + end), std::nullopt) << name << end;
    }
  }
  for (const char* other : {"shard-1.tmp", "a.safetensors.tmp", ".1.tmp", ".tmp", ".tessera.json.tmp"}) {
    EXPECT_EQ(parse_uncommitted_name(other), std::nullopt) << other;
  }
}

TEST(FileNamesTest, WhatASaveMayLeave) {
  for (const char* name : {"__0_0.distcp", "__1_2.3.distcp", ".metadata.tmp", ".metadata.3.tmp", ".tessera.json.tmp",
                           "shard-00001-model-00001-of-00001.safetensors.tmp"}) {
    EXPECT_TRUE(may_be_left_by_a_save(name)) << name;
  }
  for (const char* name :
       {".metadata", ".tessera.json", "model.safetensors", "model.safetensors.tmp", "notes.tmp", "x.distcp"}) {
    EXPECT_FALSE(may_be_left_by_a_save(name)) << name;
  }
}

}  // namespace
}  // namespace tessera::checkpoint
