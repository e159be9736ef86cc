// Rotary embedding; see rope.rs. A thread turns WIDE pairs, or copies WIDE numbers that are not
// turned. A sign of -1 turns backward.

struct Params { u32 n; float sign; };

#define HALF (D_ROTARY / 2)
#define PER_HEAD ((D_HEAD - HALF) / WIDE)

#ifdef ENTRY_rope_turn
// x, y: (n_tok, N_HEAD * D_HEAD); positions: (n_tok); slots: by position / BLOCK;
// table: (slots, BLOCK, D_ROTARY)
KERNEL rope_turn(const T0* x, const T1* positions, const T2* slots, const T3* table, T4* y,
                 Params p) {
    const u32* position = (const u32*)positions;
    const u32* slot = (const u32*)slots;
    for (size_t i = thread_of(); i < p.n / WIDE; i += n_threads()) {
        size_t head = i / PER_HEAD; // of all heads of all rows
        u32 pair = (u32)(i % PER_HEAD) * WIDE;
        size_t at = head * D_HEAD + pair;
        u32 pos = position[head / N_HEAD];
        size_t turn = ((size_t)slot[pos / BLOCK] * BLOCK + pos % BLOCK) * D_ROTARY + pair;
        if (WIDE == 4) {
            if (pair >= HALF) {
                store4(y, at + HALF, load4(x, at + HALF));
                continue;
            }
            float4 c = load4(table, turn), s = load4(table, turn + HALF);
            float4 a = load4(x, at), b = load4(x, at + HALF);
            s.x *= p.sign, s.y *= p.sign, s.z *= p.sign, s.w *= p.sign;
            store4(y, at, make_float4(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y,
                                      a.z * c.z - b.z * s.z, a.w * c.w - b.w * s.w));
            store4(y, at + HALF, make_float4(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y,
                                             b.z * c.z + a.z * s.z, b.w * c.w + a.w * s.w));
            continue;
        }
        if (pair >= HALF) {
            store(y, at + HALF, load(x, at + HALF));
            continue;
        }
        float c = load(table, turn), s = p.sign * load(table, turn + HALF);
        float a = load(x, at), b = load(x, at + HALF);
        store(y, at, a * c - b * s);
        store(y, at + HALF, b * c + a * s);
    }
}
#endif
