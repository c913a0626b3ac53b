/* A library that says which of its builds it is. */
#ifndef WHO
#define WHO "part"
#endif
const char *who(void) { return WHO; }
