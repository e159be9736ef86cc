// Rows of numbers to rows of another length, one number to a thread; see product.rs.

struct Params { u32 n, cols, x_first, x_row, y_first, y_row; float beta; };

KERNEL pitch(const T0* x, T1* y, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        u32 row = (u32)i / p.cols, col = (u32)i - row * p.cols;
        size_t to = (size_t)p.y_first + (size_t)row * p.y_row + col;
        float v = load(x, (size_t)p.x_first + (size_t)row * p.x_row + col);
        store(y, to, p.beta == 0.0f ? v : p.beta * load(y, to) + v);
    }
}
