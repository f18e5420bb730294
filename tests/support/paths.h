#pragma once
// Where the tree and the programs under test are. Defined in paths.cpp, the only source of the tests that depends on
// the folder of the build, so that a compiler cache serves every clone.

#include <string>

namespace tessera::testing {

std::string source_dir();
std::string command_path();  // the command `tessera`
std::string programs_dir();  // of the examples

}  // namespace tessera::testing
