// Rotary embedding; see rope.rs. A thread turns WIDE pairs of HEADS heads, or copies as many
// numbers that are not turned. A sign of -1 turns backward.

struct Params { u32 n; float sign; }; // n: threads

#define HALF (D_ROTARY / 2)
#define PER_HEAD ((D_HEAD - HALF) / WIDE)
#define PER_ROW (N_HEAD / HEADS)

#ifdef ENTRY_rope_turn
// x, y: (n_tok, N_HEAD * D_HEAD); positions: (n_tok); slots: by position / BLOCK;
// table: (slots, BLOCK, D_ROTARY)
KERNEL rope_turn(const T0* x, const T1* positions, const T2* slots, const T3* table, T4* y,
                 Params p) {
    const u32* position = (const u32*)positions;
    const u32* slot = (const u32*)slots;
    await_input();
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        u32 pair = (u32)(i % PER_HEAD) * WIDE;
        size_t row = i / PER_HEAD / PER_ROW, head = i / PER_HEAD % PER_ROW * HEADS;
        size_t at = (row * N_HEAD + head) * D_HEAD + pair;
        if (pair >= HALF) {
#pragma unroll
            for (int h = 0; h < HEADS; h++, at += D_HEAD) {
                if (WIDE == 8) store8(y, at + HALF, load8(x, at + HALF));
                else store(y, at + HALF, load(x, at + HALF));
            }
            continue;
        }
        u32 pos = position[row];
        size_t turn = ((size_t)slot[pos / BLOCK] * BLOCK + pos % BLOCK) * D_ROTARY + pair;
        if (WIDE == 8) {
            Eight c = load8(table, turn), s = load8(table, turn + HALF);
#pragma unroll
            for (int h = 0; h < HEADS; h++, at += D_HEAD) {
                Eight a = load8(x, at), b = load8(x, at + HALF), low, high;
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    float sine = p.sign * s.v[k];
                    low.v[k] = a.v[k] * c.v[k] - b.v[k] * sine;
                    high.v[k] = b.v[k] * c.v[k] + a.v[k] * sine;
                }
                store8(y, at, low);
                store8(y, at + HALF, high);
            }
            continue;
        }
        float c = load(table, turn), s = p.sign * load(table, turn + HALF);
#pragma unroll
        for (int h = 0; h < HEADS; h++, at += D_HEAD) {
            float a = load(x, at), b = load(x, at + HALF);
            store(y, at, a * c - b * s);
            store(y, at + HALF, b * c + a * s);
        }
    }
}
#endif
