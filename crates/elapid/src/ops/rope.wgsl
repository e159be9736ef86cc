// Rotary embedding; see rope.rs. A thread turns a pair, or copies a number that is not turned.
// A sign of -1 turns backward. WIDE is for CUDA.

struct Params { n: u32, sign: f32 }

@group(0) @binding(0) var<storage, read> x: array<f32>; // (n_tok, N_HEAD * D_HEAD)
@group(0) @binding(1) var<storage, read> positions: array<u32>; // (n_tok)
@group(0) @binding(2) var<storage, read> slots: array<u32>; // by position / BLOCK
@group(0) @binding(3) var<storage, read> table: array<f32>; // (slots, BLOCK, D_ROTARY)
@group(0) @binding(4) var<storage, read_write> y: array<f32>; // (n_tok, N_HEAD * D_HEAD)
@group(0) @binding(5) var<uniform> p: Params;

const HALF: u32 = D_ROTARY / 2u;
const PER_HEAD: u32 = D_HEAD - HALF;

@compute @workgroup_size(THREADS)
fn rope_turn(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let n_threads = n_groups.x * n_groups.y * THREADS;
    for (var i = group_of(group_id, n_groups) * THREADS + thread; i < p.n; i += n_threads) {
        let head = i / PER_HEAD; // of all heads of all rows
        let pair = i % PER_HEAD;
        let at = head * D_HEAD + pair;
        if pair >= HALF {
            y[at + HALF] = x[at + HALF];
            continue;
        }
        let pos = positions[head / N_HEAD];
        let turn = (slots[pos / BLOCK] * BLOCK + pos % BLOCK) * D_ROTARY + pair;
        let c = table[turn];
        let s = p.sign * table[turn + HALF];
        let a = x[at];
        let b = x[at + HALF];
        y[at] = a * c - b * s;
        y[at + HALF] = b * c + a * s;
    }
}
