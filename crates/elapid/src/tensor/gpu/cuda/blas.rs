//! Matrix products by cuBLASLt.
//!
//! Its matrices are stored by columns, ours by rows, so that a stored matrix is the other way round
//! for it: `out = a @ b` by rows is `out^T = b^T @ a^T` by columns, with the two sides swapped and
//! nothing moved.
//!
//! What the library chose for a shape is kept. Sums that are split are added in f32, in an order
//! that is the same every time.

use super::context::Context;
use super::{Cuda, lock};
use crate::tensor::DType;
use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use cudarc::cublaslt::sys::cublasLtMatmulDescAttributes_t as Attribute;
use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

/// Memory for the library, as NVIDIA advises for Hopper.
const WORKSPACE: usize = 32 << 20;

/// Shapes that are remembered: prompts come in all lengths.
const N_PLANS_MAX: usize = 4096;

/// A matrix as stored by rows. Numbers are counted, not bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::tensor::gpu) struct Stored {
    /// Its address; in a shape the bytes that this is a multiple of.
    pub at: CUdeviceptr,
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    /// From one row to the next.
    pub row: usize,
    pub transposed: bool,
}

/// What an epilogue reads or writes, in the dtype of the result.
#[derive(Clone, Copy, Debug)]
pub(in crate::tensor::gpu) enum Vector {
    /// One number for each column, added.
    Bias(CUdeviceptr),
    /// Sums of the rows of a, written.
    Sums(CUdeviceptr),
}

/// `out = alpha a @ b + beta out`.
#[derive(Clone, Copy, Debug)]
pub(in crate::tensor::gpu) struct Multiply {
    pub a: Stored,
    pub b: Stored,
    pub out: Stored,
    pub vector: Option<Vector>,
    /// Products of matrices that lie behind each other, on all three places.
    pub n_stacked: usize,
    pub alpha: f32,
    pub beta: f32,
    /// Whether f32 may be rounded to 10 bits.
    pub tf32: bool,
}

/// What the choice of an algorithm depends on; the left, the right and the result of cuBLASLt.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    sides: [Stored; 3],
    epilogue: sys::cublasLtEpilogue_t,
    /// As of a side.
    vector_align: CUdeviceptr,
    n_stacked: usize,
    tf32: bool,
}

impl Stored {
    /// Whether all rows are at multiples of 16 bytes.
    fn is_even(&self) -> bool {
        let row_bytes = self.dtype.n_bytes(self.row);
        self.at.is_multiple_of(16) && row_bytes.is_some_and(|n| n.is_multiple_of(16))
    }
}

fn align_of(at: CUdeviceptr) -> CUdeviceptr {
    1 << at.trailing_zeros().min(8)
}

pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    workspace: CUdeviceptr,
    /// `None` where an epilogue is not to be had.
    plans: HashMap<Shape, Option<Plan>>,
    context: Arc<Context>,
}

// SAFETY: the handle may be used from any thread, and a lock lets in one at a time.
unsafe impl Send for Blas {}

/// Descriptions of a product and the algorithm for it.
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    sides: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Plan {
    /// Says something of the product; every attribute that is used has the bytes of its `T`.
    fn set<T>(&self, name: Attribute, value: T) -> Result<(), CublasError> {
        let (value, n_bytes) = attribute(&value);
        // SAFETY: the description lives, and the value is copied.
        unsafe { lt::set_matmul_desc_attribute(self.product, name, value, n_bytes) }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: they are ours and destroyed once; null is where making them failed.
        unsafe {
            for side in self.sides.into_iter().filter(|side| !side.is_null()) {
                let _ = lt::destroy_matrix_layout(side);
            }
            let _ = lt::destroy_matmul_desc(self.product);
        }
    }
}

fn number_type(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        DType::U32 | DType::Block(_) => panic!("a product of {}", dtype.name()),
    }
}

/// A number as an attribute takes it: where it is and its bytes.
fn attribute<T>(value: &T) -> (*const c_void, usize) {
    (std::ptr::from_ref(value).cast(), size_of::<T>())
}

impl Blas {
    fn new(context: &Arc<Context>) -> Result<Blas, String> {
        context.enter();
        let told = |error: CublasError| format!("cannot open cuBLASLt: {:?}", error.0);
        let handle = lt::create_handle().map_err(told)?;
        // SAFETY: freed in `drop`.
        let workspace = unsafe { result::malloc_sync(WORKSPACE) }.unwrap_or(0);
        Ok(Blas { handle, workspace, plans: HashMap::new(), context: context.clone() })
    }

    fn workspace_bytes(&self) -> usize {
        if self.workspace == 0 { 0 } else { WORKSPACE }
    }

    /// Whether there is a way; there is one without an epilogue.
    fn run(&mut self, product: &Multiply) -> Result<bool, CublasError> {
        use sys::cublasLtEpilogue_t::{
            CUBLASLT_EPILOGUE_BGRADB, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_DEFAULT,
        };
        let (epilogue, vector) = match product.vector {
            None => (CUBLASLT_EPILOGUE_DEFAULT, 0),
            Some(Vector::Bias(at)) => (CUBLASLT_EPILOGUE_BIAS, at),
            Some(Vector::Sums(at)) => (CUBLASLT_EPILOGUE_BGRADB, at),
        };
        // Swapped: see above.
        let stored = [product.b, product.a, product.out];
        let sides = stored.map(|side| Stored { at: align_of(side.at), ..side });
        let (vector_align, n_stacked, tf32) = (align_of(vector), product.n_stacked, product.tf32);
        let shape = Shape { sides, epilogue, vector_align, n_stacked, tf32 };
        // Off multiples of 16 bytes it faults in writing sums (CUDA 13, H200); of tf32 they may be
        // rounded.
        let can_sum = vector_align >= 16 && sides.iter().all(Stored::is_even) && !tf32;
        if epilogue == CUBLASLT_EPILOGUE_BGRADB && !can_sum {
            return Ok(false);
        }
        if !self.plans.contains_key(&shape) {
            if self.plans.len() >= N_PLANS_MAX {
                self.plans.clear();
            }
            let plan = match self.plan(&shape, vector) {
                Err(error) if product.vector.is_none() => return Err(error),
                plan => plan.ok(),
            };
            self.plans.insert(shape, plan);
        }
        let Some(plan) = &self.plans[&shape] else { return Ok(false) };
        if product.vector.is_some() {
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector)?;
        }
        let [left, right, out] = stored.map(|side| side.at as *mut c_void);
        // SAFETY: operands were checked to lie inside of their buffers, the plan describes them,
        // and everything on the stream that uses the workspace runs in order.
        unsafe {
            lt::matmul(
                self.handle,
                plan.product,
                attribute(&product.alpha).0,
                attribute(&product.beta).0,
                left,
                plan.sides[0],
                right,
                plan.sides[1],
                out,
                plan.sides[2],
                out,
                plan.sides[2],
                &plan.algorithm,
                self.workspace as *mut c_void,
                self.workspace_bytes(),
                self.context.cu_stream().cast(),
            )?;
        }
        Ok(true)
    }

    fn plan(&self, shape: &Shape, vector: CUdeviceptr) -> Result<Plan, CublasError> {
        use sys::cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32};
        use sys::cublasLtMatrixLayoutAttribute_t::{
            CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT as BATCH_COUNT,
            CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET as BATCH_OFFSET,
        };
        let is_f32 = shape.sides[0].dtype == DType::F32;
        let compute =
            if shape.tf32 && is_f32 { CUBLAS_COMPUTE_32F_FAST_TF32 } else { CUBLAS_COMPUTE_32F };
        let product = lt::create_matmul_desc(compute, number_type(DType::F32))?;
        let none = std::ptr::null_mut();
        let algorithm = sys::cublasLtMatmulAlgo_t { data: [0; 8] };
        let mut plan = Plan { product, sides: [none; 3], algorithm };
        // N is 0 and T is 1.
        let [left, right] = [0, 1].map(|at| i32::from(shape.sides[at].transposed));
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, left)?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, right)?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, shape.epilogue)?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector)?;
        for (layout, side) in plan.sides.iter_mut().zip(&shape.sides) {
            // Rows of ours are columns of cuBLASLt's.
            let (rows, cols) = (side.cols as u64, side.rows as u64);
            let dtype = number_type(side.dtype);
            *layout = lt::create_matrix_layout(dtype, rows, cols, side.row as i64)?;
            if shape.n_stacked > 1 {
                let (n, apart) = (shape.n_stacked as i32, (side.rows * side.row) as i64);
                for (name, (value, n_bytes)) in
                    [(BATCH_COUNT, attribute(&n)), (BATCH_OFFSET, attribute(&apart))]
                {
                    // SAFETY: the layout lives, and values have the bytes they should.
                    unsafe { lt::set_matrix_layout_attribute(*layout, name, value, n_bytes)? };
                }
            }
        }
        plan.algorithm = self.choose(shape, &plan)?;
        Ok(plan)
    }

    /// The algorithm that the library thinks best.
    fn choose(&self, shape: &Shape, plan: &Plan) -> Result<sys::cublasLtMatmulAlgo_t, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t::{
            CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as WORKSPACE_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES as ALIGN_A,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES as ALIGN_B,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES as ALIGN_C,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES as ALIGN_D,
            CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK as REDUCTION,
        };
        let preference = lt::create_matmul_pref()?;
        let [left, right, out] = shape.sides.map(|side| side.at as u32);
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let n_bytes = self.workspace_bytes() as u64;
        let numbers = [
            (REDUCTION, attribute(&scheme)),
            (ALIGN_A, attribute(&left)),
            (ALIGN_B, attribute(&right)),
            (ALIGN_C, attribute(&out)),
            (ALIGN_D, attribute(&out)),
            (WORKSPACE_BYTES, attribute(&n_bytes)),
        ];
        // SAFETY: everything named lives until the end of this block, values have the bytes they
        // should, and the preference is destroyed once.
        unsafe {
            let set = numbers.iter().try_for_each(|&(name, (value, n_bytes))| {
                lt::set_matmul_pref_attribute(preference, name, value, n_bytes)
            });
            let [a, b, c] = plan.sides;
            let chosen = set.and_then(|()| {
                lt::get_matmul_algo_heuristic(self.handle, plan.product, a, b, c, c, preference)
            });
            let _ = lt::destroy_matmul_pref(preference);
            Ok(chosen?.algo)
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        self.context.enter();
        self.plans.clear();
        // SAFETY: both are ours and given back once.
        unsafe {
            let _ = lt::destroy_handle(self.handle);
            if self.workspace != 0 {
                let _ = result::free_sync(self.workspace);
            }
        }
    }
}

impl Cuda {
    /// Starts a product; every operand lies inside of its buffer.
    ///
    /// False where it has an epilogue that is not to be had, and nothing is done.
    pub(in crate::tensor::gpu) fn multiply(&self, product: &Multiply) -> bool {
        let _turn = self.turn();
        let mut blas = lock(&self.blas);
        if blas.is_none() {
            match Blas::new(&self.context) {
                Ok(opened) => *blas = Some(opened),
                Err(problem) => self.failure.set(problem),
            }
        }
        let Some(blas) = &mut *blas else { return true };
        let what = || {
            let Stored { rows, cols, transposed, .. } = product.a;
            let k = if transposed { rows } else { cols };
            let (m, n) = (product.out.rows, product.out.cols);
            let (from, to) = (product.a.dtype.name(), product.out.dtype.name());
            let more = match product.vector {
                None if product.n_stacked > 1 => " stacked",
                None => "",
                Some(Vector::Bias(_)) => " with bias",
                Some(Vector::Sums(_)) => " with sums",
            };
            format!("product {m}x{n}x{k} {from} {to}{more}")
        };
        let mut is_done = true;
        self.timed(what, || match blas.run(product) {
            Ok(done) => is_done = done,
            Err(error) => self.failure.set(format!("{}: {:?}", what(), error.0)),
        });
        is_done
    }
}
