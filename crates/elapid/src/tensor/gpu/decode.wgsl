
// Rows of a stored matrix in f32; see decode.rs. A thread makes four numbers.
// GATHER is 0 where the rows follow each other and `ids` is some other buffer.

@group(0) @binding(1) var<storage, read> ids: array<u32>; // (n_rows)
@group(0) @binding(2) var<storage, read_write> y: array<f32>; // (n_rows, d)
// Rows `first` to `end` of the matrix are in `words`, the first of them at byte `lead`.
struct Params { n_rows: u32, d: u32, first: u32, end: u32, lead: u32 }
@group(0) @binding(3) var<uniform> p: Params;

@compute @workgroup_size(THREADS)
fn decode(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    let n_quads = (p.d + 3u) / 4u;
    let row_bytes = p.d / BLOCK * BYTES;
    for (var at = id.x; at < p.n_rows * n_quads; at += n_groups.x * THREADS) {
        let row = at / n_quads;
        let col = at % n_quads * 4u;
        var source = row;
        if GATHER == 1u { source = ids[row]; }
        if source < p.first || source >= p.end { continue; }
        let begin = p.lead + (source - p.first) * row_bytes;
        let to = row * p.d + col;
        if col + 4u <= p.d {
            let value = four(begin, col);
            y[to] = value.x;
            y[to + 1u] = value.y;
            y[to + 2u] = value.z;
            y[to + 3u] = value.w;
        } else {
            for (var i = 0u; col + i < p.d; i++) { y[to + i] = number(begin, col + i); }
        }
    }
}
