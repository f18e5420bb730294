#include "format/pickle/opcodes.h"

#include <fmt/format.h>

namespace tessera::pickle {

std::string opcode_name(std::uint8_t opcode) {
  switch (opcode) {
#define TESSERA_PICKLE_OPCODE(name, byte) \
  case op::name:                          \
    return #name;
    TESSERA_PICKLE_OPCODES(TESSERA_PICKLE_OPCODE)
#undef TESSERA_PICKLE_OPCODE
    default:
      return fmt::format("opcode {:#04x}", opcode);
  }
}

}  // namespace tessera::pickle
