// The largest logits of rows, in order; see largest.rs. A group takes a row.

@group(0) @binding(0) var<storage, read> logits: array<f32>; // (n_row, n_vocab)
@group(0) @binding(1) var<storage, read_write> out: array<f32>; // (n_row, 2 + 2 k)
struct Params { n_row: u32, n_vocab: u32, k: u32 }
@group(0) @binding(2) var<uniform> p: Params;

const NONE: f32 = -3.4028234e38;
var<workgroup> tops: array<f32, THREADS>;
var<workgroup> ids: array<u32, THREADS>;

// Whether a number is NaN or plus infinity: told by its bits, which no compiler guesses about.
fn is_bad(x: f32) -> bool {
    let bits = bitcast<u32>(x);
    return (bits & 0x7fffffffu) >= 0x7f800000u && bits != 0xff800000u;
}

// The best of a thread's own tokens that come after (last, last_id) in the order; n_vocab if none.
fn best_after(thread: u32, row: u32, last: f32, last_id: u32) -> u32 {
    var best = p.n_vocab;
    var top = NONE;
    for (var id = thread; id < p.n_vocab; id += THREADS) {
        let x = logits[row * p.n_vocab + id];
        let is_after = x < last || (x == last && (id > last_id || last_id == p.n_vocab));
        if !is_bad(x) && is_after && x >= NONE && (x > top || best == p.n_vocab) {
            best = id;
            top = x;
        }
    }
    return best;
}

@compute @workgroup_size(THREADS)
fn largest(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_of(group_id, n_groups);
    if row >= p.n_row { return; }
    let at = row * (2u + 2u * p.k);
    var n_bad = 0.0;
    for (var id = thread; id < p.n_vocab; id += THREADS) {
        n_bad += select(0.0, 1.0, is_bad(logits[row * p.n_vocab + id]));
    }
    let n_bad_all = group_sum(thread, n_bad);
    var id = best_after(thread, row, 3.4028234e38, p.n_vocab);
    var first = NONE;
    for (var n = 0u; n < p.k; n++) {
        tops[thread] = NONE;
        if id < p.n_vocab { tops[thread] = logits[row * p.n_vocab + id]; }
        ids[thread] = id;
        workgroupBarrier();
        for (var half = THREADS / 2u; half > 0u; half /= 2u) {
            if thread < half {
                let other = thread + half;
                let is_larger = tops[other] > tops[thread];
                if is_larger || (tops[other] == tops[thread] && ids[other] < ids[thread]) {
                    tops[thread] = tops[other];
                    ids[thread] = ids[other];
                }
            }
            workgroupBarrier();
        }
        let top = workgroupUniformLoad(&tops[0]);
        let top_id = workgroupUniformLoad(&ids[0]);
        if n == 0u { first = top; }
        if thread == 0u {
            out[at + 2u + 2u * n] = select(f32(top_id), -1.0, top_id >= p.n_vocab);
            out[at + 3u + 2u * n] = top;
        }
        if top_id < p.n_vocab && top_id % THREADS == thread {
            id = best_after(thread, row, top, top_id);
        }
    }
    var sum = 0.0;
    for (var id = thread; id < p.n_vocab; id += THREADS) {
        sum += exp(logits[row * p.n_vocab + id] - first);
    }
    let total = group_sum(thread, sum);
    if thread == 0u {
        out[at] = first + log(total);
        out[at + 1u] = n_bad_all;
    }
}
