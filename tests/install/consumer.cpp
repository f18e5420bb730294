// Prints what open_error returns for its argument.

#include <iostream>
#include <string>

std::string open_error(const char* path);

int main(int, char** argv) { std::cout << open_error(argv[1]) << '\n'; }
