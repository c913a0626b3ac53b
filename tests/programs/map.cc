// A map of argv[1] MB, filled, looked at and emptied in part; prints "right" when it was what it must be.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    return x ^ x >> 31;
}

static void check(bool good, const char *what)
{
    if (!good) {
        std::fprintf(stderr, "wrong: %s\n", what);
        std::_Exit(1);
    }
}

int main(int, char **argv)
{
    // What the allocator gives for a node.
    size_t n = std::atol(argv[1]) * 1000000 / 64, i = 0;
    std::map<uint64_t, uint64_t> map;
    for (i = 0; i < n; i++)
        map.emplace_hint(map.end(), i * 3, mix(i));
    for (i = 0; i < 20000; i++) {
        uint64_t key = mix(i) % (3 * n);
        auto found = map.find(key);
        check((found != map.end()) == (key % 3 == 0), "a key");
        check(key % 3 || found->second == mix(key / 3), "a value");
    }
    for (i = 0; i < n; i += n / 1000)
        map.erase(i * 3);
    i = 0;
    for (auto &[key, value] : map) {
        i += i % (n / 1000) == 0;
        check(key == i * 3 && value == mix(i), "an entry");
        i++;
    }
    check(i >= n - 1, "the number of entries");
    std::puts("right");
}
