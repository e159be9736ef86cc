// out = alpha a @ b + beta out; see product.rs. Tiles of BM x BM numbers, BM
// 64 or 128; a thread has 4 x 4 of them, or four times that, 64 rows and 64 columns apart.
//
// A step takes 2048 / BM of k. Half of the threads bring the left side's part to shared memory,
// half the right's, 4 x 4 numbers each; the next step is on its way while one is multiplied. There
// four rows (columns) of one k are one vec4, k is the slow axis, and their order is turned by k, so
// that neither those who write nor those who read meet in a bank. A thread reads 2 of these for 16
// multiplications, or 4 for 64. Sums run along k in order, whatever the tiles.
//
// The right side, (k, n) or (n, k), is read by `stored` and `four_stored`: f32 or f16, whichever
// file stands before this one.
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
    b_first: u32,
    b_stride: u32,
    out_first: u32,
    out_stride: u32,
    alpha: f32,
    beta: f32,
}
@group(0) @binding(5) var<uniform> p: Params;

const STEP: u32 = 2048u / BM;
// Fours along a tile, and along a step.
const ROWS: u32 = BM / 4u;
const DEPTH: u32 = STEP / 4u;

var<workgroup> a_tile: array<vec4<f32>, 512>; // (STEP, ROWS)
var<workgroup> b_tile: array<vec4<f32>, 512>;

// Where the four `row` of `k` lies: k / 4 turns the places of eight.
fn place(k: u32, row: u32) -> u32 {
    return k * ROWS + (row ^ (k / 4u * (BM / 64u)));
}

// Four numbers along a stored row, `at` the first; those past `end` along it are zero.
fn a_four(at: u32, col: u32, end: u32) -> vec4<f32> {
    if A_WIDE == 1u { return a_fours[at / 4u]; }
    var value = vec4(a[at], 0.0, 0.0, 0.0);
    if col + 1u < end { value.y = a[at + 1u]; }
    if col + 2u < end { value.z = a[at + 2u]; }
    if col + 3u < end { value.w = a[at + 3u]; }
    return value;
}

fn b_four(at: u32, col: u32, end: u32) -> vec4<f32> {
    if B_WIDE == 1u { return four_stored(at); }
    var value = vec4(stored(at), 0.0, 0.0, 0.0);
    if col + 1u < end { value.y = stored(at + 1u); }
    if col + 2u < end { value.z = stored(at + 2u); }
    if col + 3u < end { value.w = stored(at + 3u); }
    return value;
}

// Stored row `row` of a side from `col` on, four numbers; nothing past its ends.
fn a_row(first: u32, row: u32, col: u32, n_rows: u32, n_cols: u32) -> vec4<f32> {
    if row >= n_rows || col >= n_cols { return vec4(0.0); }
    return a_four(first + row * p.a_stride + col, col, n_cols);
}

fn b_row(first: u32, row: u32, col: u32, n_rows: u32, n_cols: u32) -> vec4<f32> {
    if row >= n_rows || col >= n_cols { return vec4(0.0); }
    return b_four(first + row * p.b_stride + col, col, n_cols);
}

// The four by four that thread `i` of a half brings, as it is stored: row4 and k4 are fours of rows
// (columns) and of k; neighbours read neighbouring numbers, whichever way the matrix lies.
fn a_block(row4: u32, k4: u32, first: u32) -> mat4x4<f32> {
    let row = row4 * 4u;
    let k = k4 * 4u;
    if A_TRANSPOSED == 1u {
        return mat4x4(
            a_row(first, k, row, p.k, p.m), a_row(first, k + 1u, row, p.k, p.m),
            a_row(first, k + 2u, row, p.k, p.m), a_row(first, k + 3u, row, p.k, p.m),
        );
    }
    return transpose(mat4x4(
        a_row(first, row, k, p.m, p.k), a_row(first, row + 1u, k, p.m, p.k),
        a_row(first, row + 2u, k, p.m, p.k), a_row(first, row + 3u, k, p.m, p.k),
    ));
}

fn b_block(col4: u32, k4: u32, first: u32) -> mat4x4<f32> {
    let col = col4 * 4u;
    let k = k4 * 4u;
    if B_TRANSPOSED == 0u {
        return mat4x4(
            b_row(first, k, col, p.k, p.n), b_row(first, k + 1u, col, p.k, p.n),
            b_row(first, k + 2u, col, p.k, p.n), b_row(first, k + 3u, col, p.k, p.n),
        );
    }
    return transpose(mat4x4(
        b_row(first, col, k, p.n, p.k), b_row(first, col + 1u, k, p.n, p.k),
        b_row(first, col + 2u, k, p.n, p.k), b_row(first, col + 3u, k, p.n, p.k),
    ));
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

fn write_four(first: u32, row: u32, col: u32, value: mat4x4<f32>) {
    write(first, row, col, value[0]);
    write(first, row + 1u, col, value[1]);
    write(first, row + 2u, col, value[2]);
    write(first, row + 3u, col, value[3]);
}

// Adds rows of the left by columns of the right.
fn outer(s: mat4x4<f32>, left: vec4<f32>, right: vec4<f32>) -> mat4x4<f32> {
    return mat4x4(
        fma(left.xxxx, right, s[0]), fma(left.yyyy, right, s[1]),
        fma(left.zzzz, right, s[2]), fma(left.wwww, right, s[3]),
    );
}

@compute @workgroup_size(THREADS)
fn product(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let a0 = p.a_first;
    let b0 = p.b_first;
    // What this thread brings.
    let is_left = thread < 128u;
    let i = thread % 128u;
    let is_along = (is_left && A_TRANSPOSED == 1u) || (!is_left && B_TRANSPOSED == 0u);
    let four = select(i / DEPTH, i % ROWS, is_along);
    let k4 = select(i % DEPTH, i / ROWS, is_along);
    let four0 = select(group_id.x, group_id.y, is_left) * ROWS + four;
    var next: mat4x4<f32>;
    if is_left { next = a_block(four0, k4, a0); } else { next = b_block(four0, k4, b0); }

    let ty = thread / 16u;
    let tx = thread % 16u;
    var s00 = mat4x4<f32>();
    var s01 = mat4x4<f32>();
    var s10 = mat4x4<f32>();
    var s11 = mat4x4<f32>();
    for (var k0 = 0u; k0 < p.k; k0 += STEP) {
        let at = k4 * 4u;
        if is_left {
            a_tile[place(at, four)] = next[0];
            a_tile[place(at + 1u, four)] = next[1];
            a_tile[place(at + 2u, four)] = next[2];
            a_tile[place(at + 3u, four)] = next[3];
        } else {
            b_tile[place(at, four)] = next[0];
            b_tile[place(at + 1u, four)] = next[1];
            b_tile[place(at + 2u, four)] = next[2];
            b_tile[place(at + 3u, four)] = next[3];
        }
        workgroupBarrier();
        // Past the end these are zeros that nobody reads.
        let next4 = (k0 + STEP) / 4u + k4;
        if is_left { next = a_block(four0, next4, a0); } else { next = b_block(four0, next4, b0); }
        for (var k = 0u; k < STEP; k++) {
            let left = a_tile[place(k, ty)];
            let right = b_tile[place(k, tx)];
            s00 = outer(s00, left, right);
            if BM == 128u {
                let left_more = a_tile[place(k, ty + 16u)];
                let right_more = b_tile[place(k, tx + 16u)];
                s01 = outer(s01, left, right_more);
                s10 = outer(s10, left_more, right);
                s11 = outer(s11, left_more, right_more);
            }
        }
        workgroupBarrier();
    }
    let out0 = p.out_first;
    let row = group_id.y * BM + ty * 4u;
    let col = group_id.x * BM + tx * 4u;
    write_four(out0, row, col, s00);
    if BM == 128u {
        write_four(out0, row, col + 64u, s01);
        write_four(out0, row + 64u, col, s10);
        write_four(out0, row + 64u, col + 64u, s11);
    }
}
