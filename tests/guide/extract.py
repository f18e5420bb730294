#!/usr/bin/env python3
"""Assembles the C++ of a page of the guide into a program: extract.py PAGE OUTPUT.

Takes the blocks fenced with ```cpp and the hidden ones in `<!-- cpp ... -->`. A block that begins with #include, using
or struct goes to namespace scope; all others form the body of one function, in order. `check(condition, message)` in a
hidden block fails the test.
"""

import re
import sys

HEAD = """#include <cstdlib>
#include <exception>
#include <iostream>

inline void check(bool condition, const char* message) {
  if (condition) return;
  std::cerr << message << std::endl;
  std::exit(1);
}
"""
MAIN = """
int main() {
  try {
    run_page();
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
"""
BLOCK = re.compile(r"^(?:```cpp|<!-- cpp)\n(.*?)^(?:```|-->)$", re.M | re.S)


def main():
    page, output = sys.argv[1:]
    with open(page, encoding="utf-8") as file:
        text = file.read()
    outer, body = [], []
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1)) + 1
        code = f'#line {line} "{page}"\n{block[1]}'
        (outer if re.match(r"#include|using|struct", block[1]) else body).append(code)
    program = HEAD + "".join(outer) + "static void run_page() {\n" + "".join(body) + "}\n" + MAIN
    with open(output, "w", encoding="utf-8") as file:
        file.write(program)


main()
