//! A tensor: shape, dtype and storage. No arithmetic: that is what ops are for.
//!
//! Always dense and row-major, so a kernel needs lengths and no strides. Clones share storage; a
//! view is another shape of the same bytes or a range of rows. Writing needs the only handle; the
//! one exception is `rewrite`, for inputs of recorded work, which the recording shares.
//!
//! On a GPU the bytes are not at hand: `to_vec` brings the numbers over, and only ops with their
//! kernels write.

pub mod add;
pub mod batch;
pub mod cpu;
pub mod device;
pub mod devices;
pub mod failpoint;
pub mod gpu;
mod probe;
pub mod product;
pub mod quant;
pub mod rng;
pub mod segment;
pub mod shelf;

use crate::tensor::cpu::Buffer;
use crate::tensor::device::Device;
use half::slice::HalfFloatSliceExt;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes owned by somebody else, such as a memory-mapped file.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// How numbers are stored. Arithmetic is in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    F32,
    F16,
    /// The upper half of an f32.
    BF16,
    /// Whole numbers for a kernel: ids, positions, tables; or the bytes of blocks in words.
    U32,
    /// A block format of ggml.
    Block(quant::BlockType),
}

impl DType {
    /// Numbers in one block and the bytes it takes.
    pub fn block(self) -> (usize, usize) {
        match self {
            DType::F32 | DType::U32 => (1, 4),
            DType::F16 | DType::BF16 => (1, 2),
            DType::Block(block) => (block.n_elem(), block.n_bytes()),
        }
    }

    /// Bytes that `n_elem` numbers take, if they fill whole blocks and the count fits.
    pub fn n_bytes(self, n_elem: usize) -> Option<usize> {
        let (per_block, bytes) = self.block();
        let n_blocks = n_elem.is_multiple_of(per_block).then_some(n_elem / per_block)?;
        n_blocks.checked_mul(bytes)
    }

    /// As files and people name it: `f16`, `q4_k`.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::U32 => "u32",
            DType::Block(block) => block.name(),
        }
    }

    /// Encodes whole blocks, to the nearest; `out` has as many bytes as they take.
    pub fn encode(self, x: &[f32], out: &mut [u8]) {
        fn each<const N: usize>(x: &[f32], out: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
            out.as_chunks_mut().0.iter_mut().zip(x).for_each(|(y, x)| *y = bytes(*x));
        }
        assert_eq!(self.n_bytes(x.len()), Some(out.len()), "{}: bytes", self.name());
        match self {
            DType::F32 => each(x, out, f32::to_le_bytes),
            DType::F16 => each(x, out, |x| half::f16::from_f32(x).to_le_bytes()),
            DType::BF16 => each(x, out, |x| half::bf16::from_f32(x).to_le_bytes()),
            DType::U32 => panic!("floats are not stored as whole numbers"),
            DType::Block(block) => block.encode(x, out),
        }
    }
}

enum Memory {
    Pooled(Buffer),
    Shared(SharedBytes),
    Gpu(gpu::Buffer),
}

struct Storage {
    memory: Memory,
    /// What ops made of the numbers; see `Tensor::derived`.
    derived: Mutex<Vec<Derived>>,
}

/// What is made of weights once and kept beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Derivation {
    /// The numbers in bf16, for products.
    Bf16,
    /// The taps of a convolution, (d_conv, channels).
    Taps,
    /// The rates of a scan, (d_state, d_inner).
    Rates,
}

/// Made of `n_elem` numbers from `offset` on.
struct Derived {
    what: Derivation,
    offset: usize,
    n_elem: usize,
    tensor: Tensor,
}

impl Storage {
    fn new(memory: Memory) -> Arc<Storage> {
        Arc::new(Storage { memory, derived: Mutex::default() })
    }

    fn bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::Pooled(buffer) => buffer.bytes(),
            Memory::Shared(bytes) => (**bytes).as_ref(),
            Memory::Gpu(_) => panic!("bytes on a GPU were read by the host"),
        }
    }

    fn derived(&self) -> MutexGuard<'_, Vec<Derived>> {
        self.derived.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A dense array on a device.
#[derive(Clone)]
pub struct Tensor {
    shape: Vec<usize>,
    dtype: DType,
    device: Device,
    storage: Arc<Storage>,
    /// First byte within the storage.
    offset: usize,
}

impl Tensor {
    /// f32 numbers that nobody has set yet: the caller writes every one.
    pub fn uninit(device: &Device, shape: &[usize]) -> Tensor {
        Tensor::raw(device, shape, DType::F32)
    }

    /// The same in what the device stores activations in.
    pub fn activation(device: &Device, shape: &[usize]) -> Tensor {
        Tensor::raw(device, shape, device.activation_dtype())
    }

    /// The same in the dtype of another.
    pub fn uninit_as(other: &Tensor, shape: &[usize]) -> Tensor {
        Tensor::raw(&other.device, shape, other.dtype)
    }

    pub fn zeros(device: &Device, shape: &[usize]) -> Tensor {
        let mut tensor = Tensor::uninit(device, shape);
        tensor.fill_zero();
        tensor
    }

    pub fn from_f32(device: &Device, shape: &[usize], data: &[f32]) -> Tensor {
        let mut tensor = Tensor::uninit(device, shape);
        tensor.write_f32(data);
        tensor
    }

    pub fn from_u32(device: &Device, data: &[u32]) -> Tensor {
        let mut tensor = Tensor::raw(device, &[data.len()], DType::U32);
        tensor.write(bytemuck::cast_slice(data));
        tensor
    }

    pub fn fill_zero(&mut self) {
        self.zero_bytes(0..self.n_bytes().next_multiple_of(4));
    }

    /// Sets rows of f32 to zero.
    pub fn zero_rows(&mut self, rows: Range<usize>) {
        let row_bytes = self.dims2().1 * 4;
        self.zero_bytes(rows.start * row_bytes..rows.end * row_bytes);
    }

    fn zero_bytes(&mut self, bytes: Range<usize>) {
        match &self.unique().memory {
            Memory::Gpu(buffer) => buffer.gpu().fill(buffer, bytes.start, bytes.len(), 0),
            _ => self.bytes_mut()[bytes].fill(0),
        }
    }

    pub fn write_f32(&mut self, data: &[f32]) {
        assert_eq!((self.dtype, self.n_elem()), (DType::F32, data.len()), "written as f32");
        self.write(bytemuck::cast_slice(data));
    }

    fn write(&mut self, bytes: &[u8]) {
        let offset = self.offset;
        match &self.unique().memory {
            Memory::Gpu(buffer) => buffer.gpu().upload(buffer, offset, bytes),
            _ => self.bytes_mut().copy_from_slice(bytes),
        }
    }

    /// Sets all bytes on a GPU for every handle: recorded work, which shares its inputs, reads them
    /// when it is started next.
    pub(crate) fn rewrite(&self, bytes: &[u8]) {
        assert_eq!(self.n_bytes(), bytes.len(), "as many bytes as before");
        self.storage.derived().clear();
        let (buffer, offset) = self.gpu_buffer();
        buffer.gpu().upload(buffer, offset, bytes);
    }

    /// The storage of the only handle; what was made of its numbers is forgotten.
    fn unique(&mut self) -> &mut Storage {
        let Some(storage) = Arc::get_mut(&mut self.storage) else {
            panic!("a shared tensor of shape {:?} was written", self.shape)
        };
        storage.derived.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        storage
    }

    /// Where the bytes are on a GPU, and the first of them.
    pub(crate) fn gpu_buffer(&self) -> (&gpu::Buffer, usize) {
        match &self.storage.memory {
            Memory::Gpu(buffer) => (buffer, self.offset),
            _ => panic!("a tensor of shape {:?} is not on a GPU", self.shape),
        }
    }

    /// Whether a failure of the device kept it from being written: it must be made anew.
    pub(crate) fn is_spoiled(&self) -> bool {
        matches!(&self.storage.memory, Memory::Gpu(buffer) if buffer.is_spoiled())
    }

    /// Address of the first byte in the memory of CUDA; zero where that could not be had.
    pub(crate) fn cuda_address(&self) -> u64 {
        let (buffer, offset) = self.gpu_buffer();
        buffer.cuda_address().map_or(0, |at| at + offset as u64)
    }

    /// Some of the bytes as they are, read as numbers of this dtype that begin at a multiple of
    /// `align` bytes of the buffer, before the first of them where need be; and the place of that
    /// one. Whole runs of 16 bytes, for those who read them so: buffers are longer.
    pub(crate) fn view(&self, dtype: DType, bytes: Range<usize>, align: usize) -> (Tensor, usize) {
        let begin = self.offset + bytes.start;
        let lead = begin % align;
        let shape = vec![(lead + bytes.len()).div_ceil(16).max(1) * (16 / dtype.block().1)];
        (Tensor { shape, dtype, offset: begin - lead, ..self.clone() }, lead)
    }

    /// A number that tensors have in common only if they share their storage.
    pub(crate) fn memory_id(&self) -> usize {
        Arc::as_ptr(&self.storage) as usize
    }

    /// Panics when another handle shares the storage, as `f32_mut` does.
    pub(crate) fn expect_unique(&mut self) {
        self.unique();
    }

    /// A copy with storage of its own, in the same dtype.
    pub fn copied(&self) -> Tensor {
        let mut out = Tensor::raw(&self.device, &self.shape, self.dtype);
        out.copy_from(self, 0);
        out
    }

    /// Copies all of `from`, in bytes, to byte `at`.
    fn copy_from(&mut self, from: &Tensor, at: usize) {
        let n_bytes = from.n_bytes();
        match (&from.storage.memory, &self.storage.memory) {
            (Memory::Gpu(a), Memory::Gpu(b)) => a.gpu().copy((a, from.offset), (b, at), n_bytes),
            _ => self.bytes_mut()[at..at + n_bytes].copy_from_slice(from.bytes()),
        }
    }

    /// The same numbers on another device; shared where they are there already.
    pub fn to(&self, device: &Device) -> Tensor {
        if self.device.is_same(device) {
            return self.clone();
        }
        let mut out = Tensor::raw(device, &self.shape, self.dtype);
        out.write(&self.to_bytes());
        out
    }

    /// The raw bytes, brought over from wherever they are.
    pub fn to_bytes(&self) -> Cow<'_, [u8]> {
        match &self.storage.memory {
            Memory::Gpu(buffer) => {
                Cow::Owned(buffer.gpu().read_now(buffer, self.offset, self.n_bytes()))
            }
            _ => Cow::Borrowed(self.bytes()),
        }
    }

    /// The raw bytes, as soon as they are there: what a browser awaits.
    pub async fn read_bytes(&self) -> Cow<'_, [u8]> {
        match &self.storage.memory {
            Memory::Gpu(buffer) => {
                Cow::Owned(buffer.gpu().read(buffer, self.offset, self.n_bytes()).await)
            }
            _ => Cow::Borrowed(self.bytes()),
        }
    }

    /// The numbers in f32, as soon as they are there.
    pub async fn read(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.n_elem()];
        decode(self.dtype, &self.read_bytes().await, &mut out);
        out
    }

    /// The same numbers in the memory of the host.
    pub async fn read_to(&self, host: &Device) -> Tensor {
        if self.device.is_same(host) {
            return self.clone();
        }
        let mut out = Tensor::raw(host, &self.shape, self.dtype);
        out.write(&self.read_bytes().await);
        out
    }

    /// The numbers in f32, brought over from wherever they are.
    pub fn to_vec(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.n_elem()];
        decode(self.dtype, &self.to_bytes(), &mut out);
        out
    }

    /// Numbers that stay where they are, at `offset` in `bytes`.
    ///
    /// The caller has checked that they are there; f32 at an odd address are copied.
    pub fn from_shared(
        device: &Device,
        shape: &[usize],
        dtype: DType,
        bytes: SharedBytes,
        offset: usize,
    ) -> Tensor {
        let n_elem = shape.iter().product::<usize>();
        let n_bytes = dtype.n_bytes(n_elem).expect("shape fills whole blocks");
        let data = &(*bytes).as_ref()[offset..offset + n_bytes];
        if device.gpu().is_some() || !(data.as_ptr() as usize).is_multiple_of(4) {
            let mut copy = Tensor::raw(device, shape, dtype);
            copy.write(data);
            return copy;
        }
        let storage = Storage::new(Memory::Shared(bytes));
        Tensor { shape: shape.to_vec(), dtype, device: device.clone(), storage, offset }
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn n_elem(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn n_bytes(&self) -> usize {
        self.dtype.n_bytes(self.n_elem()).expect("a tensor fills whole blocks")
    }

    /// As a matrix: the last axis is the columns, all others together the rows.
    pub fn dims2(&self) -> (usize, usize) {
        let cols = self.shape.last().copied().unwrap_or(1);
        (self.n_elem().checked_div(cols).unwrap_or(0), cols)
    }

    pub fn bytes(&self) -> &[u8] {
        &self.storage.bytes()[self.offset..self.offset + self.n_bytes()]
    }

    /// The numbers of an f32 tensor.
    pub fn f32(&self) -> &[f32] {
        assert_eq!(self.dtype, DType::F32, "read as f32");
        bytemuck::cast_slice(self.bytes())
    }

    /// The numbers of an f32 tensor, to write. Panics when another handle shares the storage.
    pub fn f32_mut(&mut self) -> &mut [f32] {
        assert_eq!(self.dtype, DType::F32, "written as f32");
        bytemuck::cast_slice_mut(self.bytes_mut())
    }

    /// Whether this is the only handle, so that `f32_mut` may be called.
    pub fn is_unique(&mut self) -> bool {
        let storage = Arc::get_mut(&mut self.storage);
        storage.is_some_and(|storage| !matches!(storage.memory, Memory::Shared(_)))
    }

    /// What `make` makes of the numbers. It is made once and kept beside them, until they are
    /// written or dropped: for what every token would make again of weights that stay.
    pub fn derived(&self, what: Derivation, make: impl FnOnce(&Tensor) -> Tensor) -> Tensor {
        let list = || self.storage.derived();
        let (offset, n_elem) = (self.offset, self.n_elem());
        let is_same = |one: &&Derived| (one.what, one.offset, one.n_elem) == (what, offset, n_elem);
        list().retain(|one| !one.tensor.is_spoiled());
        if let Some(one) = list().iter().find(is_same) {
            return one.tensor.clone();
        }
        // The lock is not held while threads work: one of them may come here for another call.
        let tensor = make(self);
        list().push(Derived { what, offset, n_elem, tensor: tensor.clone() });
        tensor
    }

    /// What is kept of all the numbers, if nobody else has it: for who is about to write them and
    /// makes it anew in place, to `keep_derived` it then.
    pub(crate) fn take_derived(&mut self, what: Derivation) -> Option<Tensor> {
        let n_elem = self.n_elem();
        let mut list = Arc::get_mut(&mut self.storage)?.derived();
        let is_it = |one: &Derived| (one.what, one.offset, one.n_elem) == (what, 0, n_elem);
        let idx = list.iter().position(is_it)?;
        let mut tensor = list.swap_remove(idx).tensor;
        tensor.is_unique().then_some(tensor)
    }

    /// Keeps what was made of the numbers as they are now.
    pub(crate) fn keep_derived(&self, what: Derivation, tensor: Tensor) {
        self.derived(what, |_| tensor);
    }

    /// A copy in f32 with storage of its own.
    pub fn to_f32(&self) -> Tensor {
        match &self.device {
            Device::Cpu(_) => {
                let mut out = Tensor::uninit(&self.device, &self.shape);
                self.read_f32(0, out.f32_mut());
                out
            }
            Device::Gpu(_) if self.dtype == DType::F32 => self.copied(),
            Device::Gpu(gpu) => gpu.cast(self, DType::F32),
        }
    }

    /// Decodes `out.len()` numbers from element `first` on; both on block boundaries.
    pub fn read_f32(&self, first: usize, out: &mut [f32]) {
        let begin = self.dtype.n_bytes(first).expect("first element on a block boundary");
        let n_bytes = self.dtype.n_bytes(out.len()).expect("whole blocks");
        decode(self.dtype, &self.bytes()[begin..begin + n_bytes], out);
    }

    /// A copy of these rows, in this order, of a matrix or a vector (whose rows are its numbers).
    pub fn gather(&self, rows: &[usize]) -> Tensor {
        let n_rows = self.shape[0];
        let per_row = self.n_elem().checked_div(n_rows).unwrap_or(0);
        let n_bytes = self.dtype.n_bytes(per_row).expect("rows of whole blocks");
        let mut shape = self.shape.clone();
        shape[0] = rows.len();
        let mut out = Tensor::raw(&self.device, &shape, self.dtype);
        if let Memory::Gpu(from) = &self.storage.memory {
            let (to, _) = out.gpu_buffer();
            for (idx, &row) in rows.iter().enumerate() {
                let at = (from, self.offset + row * n_bytes);
                from.gpu().copy(at, (to, idx * n_bytes), n_bytes);
            }
            return out;
        }
        let from = self.bytes();
        for (to, &row) in out.bytes_mut().chunks_exact_mut(n_bytes.max(1)).zip(rows) {
            to.copy_from_slice(&from[row * n_bytes..(row + 1) * n_bytes]);
        }
        out
    }

    /// Matrices of one dtype and width, one below the other, copied.
    pub fn stack(parts: &[Tensor]) -> Tensor {
        let first = parts.first().expect("at least one part");
        let mut shape = first.shape.clone();
        shape[0] = parts.iter().map(|part| part.shape[0]).sum();
        let mut out = Tensor::raw(&first.device, &shape, first.dtype);
        let mut at = 0;
        for part in parts {
            assert_eq!((part.dtype, &part.shape[1..]), (first.dtype, &first.shape[1..]), "stack");
            out.copy_from(part, at);
            at += part.n_bytes();
        }
        out
    }

    /// Storage of its own in any dtype, to be filled.
    pub(crate) fn raw(device: &Device, shape: &[usize], dtype: DType) -> Tensor {
        let n_bytes = dtype.n_bytes(shape.iter().product()).expect("whole blocks");
        let storage = Storage::new(match device {
            Device::Cpu(cpu) => Memory::Pooled(cpu.pool().take(n_bytes)),
            Device::Gpu(gpu) => Memory::Gpu(gpu.take(n_bytes)),
        });
        Tensor { shape: shape.to_vec(), dtype, device: device.clone(), storage, offset: 0 }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let range = self.offset..self.offset + self.n_bytes();
        match &mut self.unique().memory {
            Memory::Pooled(buffer) => &mut buffer.bytes_mut()[range],
            Memory::Shared(_) => panic!("shared bytes were written"),
            Memory::Gpu(_) => panic!("bytes on a GPU were written by the host"),
        }
    }

    /// The same numbers under another shape.
    pub fn reshape(&self, shape: &[usize]) -> Tensor {
        let n_elem: usize = shape.iter().product();
        assert_eq!(n_elem, self.n_elem(), "reshape of {:?} to {shape:?}", self.shape);
        Tensor { shape: shape.to_vec(), ..self.clone() }
    }

    /// A range along the first axis, sharing storage.
    pub fn rows(&self, range: Range<usize>) -> Tensor {
        assert!(range.end <= self.shape[0], "rows {range:?} of {:?}", self.shape);
        let mut shape = self.shape.clone();
        let per_row: usize = shape[1..].iter().product();
        let skip = self.dtype.n_bytes(range.start * per_row).expect("rows on block boundaries");
        shape[0] = range.len();
        Tensor { shape, offset: self.offset + skip, ..self.clone() }
    }

    /// Panics with who, expected and got unless the shape is `want`.
    pub fn expect_shape(&self, what: &str, want: &[usize]) {
        assert!(self.shape == want, "{what}: expected shape {want:?}, got {:?}", self.shape);
    }
}

/// Numbers of any dtype as f32.
fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => bytemuck::cast_slice_mut(out).copy_from_slice(bytes),
        DType::F16 => match bytemuck::try_cast_slice::<u8, half::f16>(bytes) {
            Ok(halves) => halves.convert_to_f32_slice(out),
            // At an odd address.
            Err(_) => {
                let halves = out.iter_mut().zip(bytes.as_chunks::<2>().0);
                halves.for_each(|(y, x)| *y = half::f16::from_le_bytes(*x).to_f32());
            }
        },
        DType::BF16 => {
            for (y, x) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *y = f32::from_bits(u32::from(u16::from_le_bytes(*x)) << 16);
            }
        }
        DType::U32 => panic!("whole numbers were read as floats"),
        DType::Block(block) => block.decode(bytes, out),
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}{:?}", self.dtype, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_of_rows_shares_the_bytes() {
        let device = Device::cpu(1).unwrap();
        let x = Tensor::from_f32(&device, &[3, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(x.rows(1..3).f32(), [2.0, 3.0, 4.0, 5.0]);
        assert_eq!(x.rows(1..2).reshape(&[2]).shape(), [2]);
    }

    #[test]
    #[should_panic(expected = "a shared tensor of shape [2] was written")]
    fn writing_a_shared_tensor_panics() {
        let device = Device::cpu(1).unwrap();
        let mut x = Tensor::zeros(&device, &[2]);
        let _other = x.clone();
        x.f32_mut()[0] = 1.0;
    }

    #[test]
    #[should_panic(expected = "read as f32")]
    fn whole_numbers_are_not_read_as_floats() {
        Tensor::from_u32(&Device::cpu(1).unwrap(), &[1, 2]).f32();
    }

    #[test]
    fn what_is_derived_is_made_once_and_again_after_a_write() {
        let device = Device::cpu(1).unwrap();
        let mut x = Tensor::from_f32(&device, &[2, 1], &[1.0, 2.0]);
        let double = |x: &Tensor| Tensor::from_f32(x.device(), &[1], &[2.0 * x.f32()[0]]);
        let never = |_: &Tensor| -> Tensor { panic!("made twice") };
        assert_eq!(x.derived(Derivation::Taps, double).f32(), [2.0]);
        assert_eq!(x.clone().derived(Derivation::Taps, never).f32(), [2.0]);
        // Other numbers of the same storage, and another derivation, are something else.
        assert_eq!(x.rows(1..2).derived(Derivation::Taps, double).f32(), [4.0]);
        assert_eq!(x.derived(Derivation::Rates, |x| x.rows(0..1).to_f32()).f32(), [1.0]);
        x.f32_mut()[0] = 5.0;
        assert_eq!(x.derived(Derivation::Taps, double).f32(), [10.0]);
        assert!(x.is_unique());
    }

    #[test]
    fn halves_decode_exactly_also_at_odd_addresses() {
        let device = Device::cpu(1).unwrap();
        let mut bytes = vec![0u8];
        bytes.extend(half::bf16::from_f32(-2.5).to_le_bytes());
        bytes.extend(half::bf16::from_f32(0.15625).to_le_bytes());
        let x = Tensor::from_shared(&device, &[2], DType::BF16, Arc::new(bytes), 1);
        assert_eq!(x.to_f32().f32(), [-2.5, 0.15625]);
    }
}
