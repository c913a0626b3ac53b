#include <stdexcept>
#include <string>
void thrower(int n) { throw std::runtime_error("thrown " + std::to_string(n)); }
