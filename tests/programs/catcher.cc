// An exception from a library, iostreams, a thread.
#include <iostream>
#include <stdexcept>
#include <thread>
void thrower(int);
int main() {
    std::thread([] {
        try { thrower(7); } catch (const std::exception &e) { std::cout << "caught " << e.what() << std::endl; }
    }).join();
}
