// Prints the code of the error that opening what isn't there gives, so that every module is linked.

#include <iostream>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"

int main(int, char** argv) {
  try {
    tessera::checkpoint::Checkpoint::open(argv[1]);
  } catch (const tessera::Error& error) {
    std::cout << tessera::error_code_name(error.code()) << '\n';
  }
}
