cimport cython
from kvlockstep.gpu_impl.compiled.victims cimport VictimQueue

cdef long long ROOT, TOKEN_BYTES

cdef class PrefixTree:
    cdef readonly Py_ssize_t page_bytes, overlap_bytes, first_bytes
    cdef object _policy
    cdef readonly long long tick, evictable, protected
    cdef readonly list edge, pages, children, namespace
    cdef readonly long long[::1] parent, end, lock_ref, stamp, created, hits, priority
    cdef list _spare
    cdef readonly VictimQueue victims

    @cython.locals(path=list, node="long long", end="long long")
    cpdef match(self, tuple namespace, bytes key, long long n_pages, bint lock)
    @cython.locals(path=list, node="long long", end="long long")
    cpdef publish(self, long long anchor, tuple namespace, bytes key, own_pages, long long inserted, long long priority)
    @cython.locals(path=list, walked="long long", offset="Py_ssize_t", children=dict, first=bytes, edge=bytes)
    cdef list _descend(self, long long node, tuple namespace, bytes key, long long n_pages)
    cdef _pages_along(self, list path)
    @cython.locals(node="long long", newly_locked="long long")
    cpdef _move_lock(self, long long old, long long new)
    @cython.locals(node="long long", newly_unlocked="long long")
    cpdef unlock(self, long long anchor)
    @cython.locals(node="long long", parent="long long", children=dict)
    cpdef evict_one(self)
    cpdef _requeue(self, long long node)
    cdef _enqueue(self, long long node)
