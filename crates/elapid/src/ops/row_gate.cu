// y = sigmoid(gate) x, a gate for each row of D numbers, and the gradient of the gate; see
// row_gate.rs.

struct Params { u32 n; };

#ifdef ENTRY_row_gate_forward
KERNEL row_gate_forward(const T0* x, const T1* gate, T2* y, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        store(y, i, sigmoid(load(gate, i / D)) * load(x, i));
    }
}
#endif

#ifdef ENTRY_row_gate_backward
// A group takes a row; `n` counts rows.
KERNEL row_gate_backward(const T0* x, const T1* gate, const T2* dy, T3* dgate, Params p) {
    size_t row = group_of();
    if (row >= p.n) return;
    float part = 0.0f;
    for (u32 i = threadIdx.x; i < D; i += THREADS) {
        part += load(x, row * D + i) * load(dy, row * D + i);
    }
    float dot = group_sum(part);
    float s = sigmoid(load(gate, row));
    if (threadIdx.x == 0) store(dgate, row, s * (1.0f - s) * dot);
}
#endif
