cimport cython

cdef long long ARITY, WIDTH, NODE, NOWHERE

cdef class VictimQueue:
    cdef long long[::1] _heap
    cdef long long[::1] _place
    cdef long long _n

    @cython.locals(place="long long", at="long long")
    cpdef put(self, long long node, long long first, long long second, long long guard)
    @cython.locals(place="long long")
    cpdef discard(self, long long node)
    @cython.locals(node="long long")
    cpdef long long pop(self)
    @cython.locals(above="long long", first="long long", below="long long")
    cdef void _settle(self, long long place) except *
    @cython.locals(a="long long", b="long long")
    cdef bint _is_before(self, long long place, long long other) except? -1
    @cython.locals(a="long long", b="long long", kept="long long")
    cdef void _swap(self, long long place, long long other) except *
