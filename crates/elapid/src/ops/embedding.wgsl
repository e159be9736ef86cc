// The gradient of an embedding table; see embedding.rs. A group takes a row of the table.

// Tokens by id (n_tok), ids that occur (n_rows), where each begins among the tokens (n_rows + 1).
@group(0) @binding(0) var<storage, read> lists: array<u32>;
@group(0) @binding(1) var<storage, read> dy: array<f32>; // (n_tok, d)
@group(0) @binding(2) var<storage, read_write> dtable: array<f32>; // (rows from `row0` on, d)
// Groups take the ids from number `first` to `end`.
struct Params { n_tok: u32, n_rows: u32, first: u32, end: u32, row0: u32, d: u32 }
@group(0) @binding(3) var<uniform> p: Params;

@compute @workgroup_size(THREADS)
fn embedding_backward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let idx = p.first + group_of(group_id, n_groups);
    if idx >= p.end { return; }
    let row = lists[p.n_tok + idx] - p.row0;
    let begin = lists[p.n_tok + p.n_rows + idx];
    let end = lists[p.n_tok + p.n_rows + idx + 1u];
    for (var col = thread; col < p.d; col += THREADS) {
        var total = 0.0;
        for (var at = begin; at < end; at++) {
            total += dy[lists[at] * p.d + col];
        }
        dtable[row * p.d + col] = total;
    }
}
