// Rows of numbers to rows of another length, filled up with zeros, one number to a thread; see
// product.rs.

struct Params { u32 n_rows, n_cols, rows, cols, x_first, x_row, y_first, y_row; float beta; };

KERNEL pitch(const T0* x, T1* y, Params p) {
    u32 col = blockIdx.y * THREADS + threadIdx.x;
    if (col >= p.n_cols) return;
    for (u32 row = blockIdx.x; row < p.n_rows; row += gridDim.x) {
        size_t to = (size_t)p.y_first + (size_t)row * p.y_row + col;
        bool is_there = row < p.rows && col < p.cols;
        float v = is_there ? load(x, (size_t)p.x_first + (size_t)row * p.x_row + col) : 0.0f;
        store(y, to, p.beta == 0.0f ? v : p.beta * load(y, to) + v);
    }
}
