"""What a compiler of graphs does not find by itself: hand-written C++ for the parts that took the most time.

`*.cpp` are the kernels, `ops` makes operators of them, `library` compiles and opens them.
"""
