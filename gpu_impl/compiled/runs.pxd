cimport cython

@cython.locals(into="int[::1]", token="long long", lost="long long", i="Py_ssize_t")
cpdef bytes int32_bytes(const long long[::1] tokens, Py_ssize_t start, Py_ssize_t n)

@cython.locals(into="int[::1]", at="Py_ssize_t", slot="int", i="Py_ssize_t")
cpdef slots_of(const int[::1] pages, int page_size)
