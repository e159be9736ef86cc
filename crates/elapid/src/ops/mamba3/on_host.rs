//! `mamba3` of a GPU's tensors, computed on the CPU.

use super::*;

impl Inputs {
    fn to(&self, device: &Device) -> Inputs {
        let to = |x: &Tensor| x.to_f32().to(device);
        Inputs {
            xbc: to(&self.xbc),
            raw: to(&self.raw),
            delta_bias: to(&self.delta_bias),
            b_norm: to(&self.b_norm),
            c_norm: to(&self.c_norm),
            b_bias: to(&self.b_bias),
            c_bias: to(&self.c_bias),
            skip: to(&self.skip),
            mimo_x: self.mimo_x.as_ref().map(to),
            dims: self.dims,
        }
    }
}

/// On `device`, in the dtype of activations there.
fn activation(x: &Tensor, device: &Device) -> Tensor {
    let x = x.to(device);
    device.gpu().map_or(x.clone(), |gpu| gpu.cast(&x, device.activation_dtype()))
}

pub(super) fn forward(
    inputs: &Inputs,
    segments: &Segments,
    states: Option<[&mut [&mut Tensor]; 4]>,
) -> Tensor {
    let (there, host) = (inputs.xbc.device(), inputs.xbc.device().host_device());
    let inputs = inputs.to(&host);
    let Some(states) = states else {
        return activation(&super::forward(&inputs, segments, None), there);
    };
    let mut copies = states
        .each_ref()
        .map(|list| -> Vec<Tensor> { list.iter().map(|state| state.to(&host)).collect() });
    let mut handles = copies.each_mut().map(|list| list.iter_mut().collect::<Vec<_>>());
    let lists = handles.each_mut().map(|list| &mut list[..]);
    let y = activation(&super::forward(&inputs, segments, Some(lists)), there);
    for (list, copies) in states.into_iter().zip(copies) {
        list.iter_mut().zip(copies).for_each(|(state, copy)| **state = copy.to(there));
    }
    y
}

pub(super) fn backward(
    inputs: &Inputs,
    segments: &Segments,
    initial: Option<&[Vec<Tensor>; 4]>,
    dy: &Tensor,
) -> Vec<Option<Tensor>> {
    let (there, host) = (inputs.xbc.device(), inputs.xbc.device().host_device());
    let dtype = inputs.xbc.dtype();
    let inputs = inputs.to(&host);
    let initial = initial.map(|initial| {
        initial.each_ref().map(|list| list.iter().map(|state| state.to(&host)).collect())
    });
    let grads = super::backward(&inputs, segments, initial.as_ref(), &dy.to_f32().to(&host));
    let mut grads: Vec<_> = grads.into_iter().map(|grad| grad.map(|grad| grad.to(there))).collect();
    if let (Some(gpu), Some(Some(dxbc))) = (there.gpu(), grads.first_mut()) {
        *dxbc = gpu.cast(dxbc, dtype);
    }
    grads
}
