// out = alpha a @ b + beta out; see product.rs. Tiles of 64 x 64, steps of 16 along k, 4 x 4 numbers
// to a thread. Tiles lie in shared memory with k as the slow axis, so that a thread reads runs.

@group(0) @binding(0) var<storage, read> a: array<f32>; // (m, k), or (k, m)
@group(0) @binding(1) var<storage, read> b: array<f32>; // (k, n), or (n, k)
@group(0) @binding(2) var<storage, read_write> out: array<f32>; // (rows, n), written from `first`

struct Params { m: u32, n: u32, k: u32, first: u32, alpha: f32, beta: f32 }
@group(0) @binding(3) var<uniform> p: Params;

const TILE: u32 = 64u;
const STEP: u32 = 16u;

var<workgroup> a_tile: array<f32, 1088>; // STEP x (TILE + 4)
var<workgroup> b_tile: array<f32, 1088>;
const ROW: u32 = 68u;

fn a_at(row: u32, k: u32) -> f32 {
    if row >= p.m || k >= p.k { return 0.0; }
    if A_TRANSPOSED == 1u { return a[k * p.m + row]; }
    return a[row * p.k + k];
}

fn b_at(k: u32, col: u32) -> f32 {
    if col >= p.n || k >= p.k { return 0.0; }
    if B_TRANSPOSED == 1u { return b[col * p.k + k]; }
    return b[k * p.n + col];
}

@compute @workgroup_size(THREADS)
fn product(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row0 = group_id.y * TILE;
    let col0 = group_id.x * TILE;
    let ty = thread / 16u;
    let tx = thread % 16u;
    var sums: array<vec4<f32>, 4>;
    for (var k0 = 0u; k0 < p.k; k0 += STEP) {
        for (var i = thread; i < TILE * STEP; i += THREADS) {
            // Neighbouring threads read neighbouring numbers, whichever way the matrix lies.
            if A_TRANSPOSED == 1u {
                a_tile[(i / TILE) * ROW + i % TILE] = a_at(row0 + i % TILE, k0 + i / TILE);
            } else {
                a_tile[(i % STEP) * ROW + i / STEP] = a_at(row0 + i / STEP, k0 + i % STEP);
            }
            if B_TRANSPOSED == 1u {
                b_tile[(i % STEP) * ROW + i / STEP] = b_at(k0 + i % STEP, col0 + i / STEP);
            } else {
                b_tile[(i / TILE) * ROW + i % TILE] = b_at(k0 + i / TILE, col0 + i % TILE);
            }
        }
        workgroupBarrier();
        for (var k = 0u; k < STEP; k++) {
            let at_a = k * ROW + ty * 4u;
            let at_b = k * ROW + tx * 4u;
            let b4 = vec4<f32>(b_tile[at_b], b_tile[at_b + 1u], b_tile[at_b + 2u], b_tile[at_b + 3u]);
            sums[0] += a_tile[at_a] * b4;
            sums[1] += a_tile[at_a + 1u] * b4;
            sums[2] += a_tile[at_a + 2u] * b4;
            sums[3] += a_tile[at_a + 3u] * b4;
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < 4u; i++) {
        let row = row0 + ty * 4u + i;
        for (var j = 0u; j < 4u; j++) {
            let col = col0 + tx * 4u + j;
            if row < p.m && col < p.n {
                let at = (p.first + row) * p.n + col;
                var y = p.alpha * sums[i][j];
                if p.beta != 0.0 { y += p.beta * out[at]; }
                out[at] = y;
            }
        }
    }
}
