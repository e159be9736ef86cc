// out = alpha a @ b + beta out, for each of a batch; see product.rs. Tiles of BM x 64 numbers, BM
// 64 or 128, steps of 16 along k; a thread has 4 x 4 of them, or twice that, 64 rows apart.
//
// Tiles lie in shared memory with k as the slow axis, so that a thread reads runs; the next step is
// on its way while one is multiplied. Sums run along k in order, whatever the tiles.
//
// The right side, (k, n) or (n, k), is read by `stored` and `four_stored`, and its tile holds what
// they give: f32 or f16, whichever file stands before this one.
//
// A_WIDE, B_WIDE: 1 where four numbers along a stored row can be read at once: the same buffers,
// bound once more.

@group(0) @binding(1) var<storage, read> a: array<f32>; // (m, k), or (k, m)
@group(0) @binding(3) var<storage, read> a_fours: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>; // (m, n) from `out_first` on

struct Params {
    m: u32,
    n: u32,
    k: u32,
    a_first: u32,
    a_stride: u32,
    a_matrix: u32,
    b_first: u32,
    b_stride: u32,
    b_matrix: u32,
    out_first: u32,
    out_stride: u32,
    out_matrix: u32,
    alpha: f32,
    beta: f32,
}
@group(0) @binding(5) var<uniform> p: Params;

const STEP: u32 = 16u;
// Numbers between two k in the tiles; off the width of memory banks.
const A_ROW: u32 = BM + 4u;
const B_ROW: u32 = 68u;

var<workgroup> a_tile: array<f32, 16u * (BM + 4u)>;
var<workgroup> b_tile: array<Stored, 1088>;

// Four numbers along a stored row, `at` the first; those past `end` along it are zero.
fn a_four(at: u32, col: u32, end: u32) -> vec4<f32> {
    if A_WIDE == 1u { return a_fours[at / 4u]; }
    var value = vec4(a[at], 0.0, 0.0, 0.0);
    if col + 1u < end { value.y = a[at + 1u]; }
    if col + 2u < end { value.z = a[at + 2u]; }
    if col + 3u < end { value.w = a[at + 3u]; }
    return value;
}

fn b_four(at: u32, col: u32, end: u32) -> vec4<Stored> {
    if B_WIDE == 1u { return four_stored(at); }
    var value = vec4(stored(at), 0.0, 0.0, 0.0);
    if col + 1u < end { value.y = stored(at + 1u); }
    if col + 2u < end { value.z = stored(at + 2u); }
    if col + 3u < end { value.w = stored(at + 3u); }
    return value;
}

// The i-th four of a tile of a; neighbouring threads read neighbouring numbers, whichever way the
// matrix lies.
fn a_load(i: u32, row0: u32, k0: u32, first: u32) -> vec4<f32> {
    if A_TRANSPOSED == 1u {
        let k = k0 + i / (BM / 4u);
        let row = row0 + i % (BM / 4u) * 4u;
        if k >= p.k || row >= p.m { return vec4(0.0); }
        return a_four(first + k * p.a_stride + row, row, p.m);
    }
    let row = row0 + i / 4u;
    let k = k0 + i % 4u * 4u;
    if k >= p.k || row >= p.m { return vec4(0.0); }
    return a_four(first + row * p.a_stride + k, k, p.k);
}

fn a_put(i: u32, value: vec4<f32>) {
    var at = i / (BM / 4u) * A_ROW + i % (BM / 4u) * 4u;
    var step = 1u;
    if A_TRANSPOSED == 0u {
        at = i % 4u * 4u * A_ROW + i / 4u;
        step = A_ROW;
    }
    a_tile[at] = value.x;
    a_tile[at + step] = value.y;
    a_tile[at + 2u * step] = value.z;
    a_tile[at + 3u * step] = value.w;
}

fn b_load(i: u32, col0: u32, k0: u32, first: u32) -> vec4<Stored> {
    if B_TRANSPOSED == 1u {
        let col = col0 + i / 4u;
        let k = k0 + i % 4u * 4u;
        if k >= p.k || col >= p.n { return vec4<Stored>(); }
        return b_four(first + col * p.b_stride + k, k, p.k);
    }
    let k = k0 + i / 16u;
    let col = col0 + i % 16u * 4u;
    if k >= p.k || col >= p.n { return vec4<Stored>(); }
    return b_four(first + k * p.b_stride + col, col, p.n);
}

fn b_put(i: u32, value: vec4<Stored>) {
    var at = i / 16u * B_ROW + i % 16u * 4u;
    var step = 1u;
    if B_TRANSPOSED == 1u {
        at = i % 4u * 4u * B_ROW + i / 4u;
        step = B_ROW;
    }
    b_tile[at] = value.x;
    b_tile[at + step] = value.y;
    b_tile[at + 2u * step] = value.z;
    b_tile[at + 3u * step] = value.w;
}

fn write(first: u32, row: u32, col0: u32, value: vec4<f32>) {
    if row >= p.m { return; }
    for (var j = 0u; j < 4u; j++) {
        if col0 + j < p.n {
            let at = first + row * p.out_stride + col0 + j;
            var y = p.alpha * value[j];
            if p.beta != 0.0 { y += p.beta * out[at]; }
            out[at] = y;
        }
    }
}

@compute @workgroup_size(THREADS)
fn product(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let a0 = p.a_first + group_id.z * p.a_matrix;
    let b0 = p.b_first + group_id.z * p.b_matrix;
    let row0 = group_id.y * BM;
    let col0 = group_id.x * 64u;
    let ty = thread / 16u * 4u;
    let tx = thread % 16u * 4u;
    var s0 = vec4(0.0); var s1 = vec4(0.0); var s2 = vec4(0.0); var s3 = vec4(0.0);
    var t0 = vec4(0.0); var t1 = vec4(0.0); var t2 = vec4(0.0); var t3 = vec4(0.0);
    var a_next = a_load(thread, row0, 0u, a0);
    var a_more = vec4(0.0);
    if BM == 128u { a_more = a_load(thread + 256u, row0, 0u, a0); }
    var b_next = b_load(thread, col0, 0u, b0);
    for (var k0 = 0u; k0 < p.k; k0 += STEP) {
        a_put(thread, a_next);
        if BM == 128u { a_put(thread + 256u, a_more); }
        b_put(thread, b_next);
        workgroupBarrier();
        // Past the end these are zeros that nobody reads.
        a_next = a_load(thread, row0, k0 + STEP, a0);
        if BM == 128u { a_more = a_load(thread + 256u, row0, k0 + STEP, a0); }
        b_next = b_load(thread, col0, k0 + STEP, b0);
        for (var k = 0u; k < STEP; k++) {
            let at = k * B_ROW + tx;
            let four = vec4(b_tile[at], b_tile[at + 1u], b_tile[at + 2u], b_tile[at + 3u]);
            let right = vec4<f32>(four);
            let left = k * A_ROW + ty;
            s0 += a_tile[left] * right;
            s1 += a_tile[left + 1u] * right;
            s2 += a_tile[left + 2u] * right;
            s3 += a_tile[left + 3u] * right;
            if BM == 128u {
                t0 += a_tile[left + 64u] * right;
                t1 += a_tile[left + 65u] * right;
                t2 += a_tile[left + 66u] * right;
                t3 += a_tile[left + 67u] * right;
            }
        }
        workgroupBarrier();
    }
    let out0 = p.out_first + group_id.z * p.out_matrix;
    write(out0, row0 + ty, col0 + tx, s0);
    write(out0, row0 + ty + 1u, col0 + tx, s1);
    write(out0, row0 + ty + 2u, col0 + tx, s2);
    write(out0, row0 + ty + 3u, col0 + tx, s3);
    if BM == 128u {
        write(out0, row0 + ty + 64u, col0 + tx, t0);
        write(out0, row0 + ty + 65u, col0 + tx, t1);
        write(out0, row0 + ty + 66u, col0 + tx, t2);
        write(out0, row0 + ty + 67u, col0 + tx, t3);
    }
}
