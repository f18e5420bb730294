// tessera_docs DIR: writes the man pages to DIR/man1 and the completion scripts of bash, zsh and fish to DIR.

#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "cli/docs/docs.h"

namespace tessera::cli {
namespace {

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path);
  file.exceptions(std::ios::failbit | std::ios::badbit);
  file << text;
  file.close();
}

void write_all(const std::filesystem::path& folder) {
  bool ignored = false;
  const Program program = tessera_program(ignored);
  std::filesystem::remove_all(folder / "man1");
  std::filesystem::create_directories(folder / "man1");
  write(folder / "man1/tessera.1", program_page(program, TESSERA_VERSION));
  for (const Command& command : program.commands) {
    write(folder / "man1" / ("tessera-" + std::string(command.name) + ".1"),
          command_page(program, command, TESSERA_VERSION));
  }
  write(folder / "tessera.bash", bash_completion(program));
  write(folder / "_tessera", zsh_completion(program));
  write(folder / "tessera.fish", fish_completion(program));
}

}  // namespace
}  // namespace tessera::cli

int main(int argc, char** argv) {
  try {
    if (argc != 2) throw std::invalid_argument("expected one argument, the folder to write");
    tessera::cli::write_all(argv[1]);
  } catch (const std::exception& error) {
    std::cerr << "tessera_docs: " << error.what() << '\n';
    return 1;
  }
}
