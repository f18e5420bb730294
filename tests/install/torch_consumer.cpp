// Prints what save_and_load returns.

#include <iostream>

double save_and_load();

int main() { std::cout << save_and_load() << '\n'; }
