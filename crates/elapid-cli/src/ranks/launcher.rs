//! What started this process, by the variables that launchers set.
//!
//! | launcher                     | variables                                                   |
//! |------------------------------|-------------------------------------------------------------|
//! | Open MPI's `mpirun`          | `OMPI_COMM_WORLD_SIZE`                                      |
//! | MPICH, Intel MPI, `srun` PMI | `PMI_SIZE`, with `PMI_RANK`                                 |
//! | `srun --mpi=pmix`            | `PMIX_RANK` in a step of Slurm, `SLURM_NTASKS`              |
//! | torchrun, and by hand        | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`; in a    |
//! |                              | step of Slurm `SLURM_PROCID` and `SLURM_NTASKS` do as well  |

use crate::report::{Done, Failure};

/// What started this process with others.
#[derive(Debug, PartialEq)]
pub enum Launcher {
    /// Nothing did, or it started one.
    None,
    /// It speaks MPI: names of libraries to try.
    #[cfg(unix)]
    Mpi(Vec<String>),
    Tcp(Place),
}

/// A rank, and where ranks meet.
#[derive(Debug, PartialEq)]
pub struct Place {
    pub rank: usize,
    pub n_ranks: usize,
    /// Host and port of rank 0.
    pub address: String,
    pub port: u16,
}

#[cfg(unix)]
const OPEN_MPI: [&str; 4] = ["libmpi.so.40", "libmpi.so", "libmpi.40.dylib", "libmpi.dylib"];
#[cfg(unix)]
const MPICH: [&str; 5] =
    ["libmpich.so.12", "libmpi.so.12", "libmpich.so", "libmpi.12.dylib", "libmpi.so"];

impl Launcher {
    pub fn found() -> Done<Launcher> {
        Launcher::by(&|name| std::env::var(name).ok())
    }

    fn by(variable: &dyn Fn(&str) -> Option<String>) -> Done<Launcher> {
        let number = |name: &str| variable(name).and_then(|text| text.parse::<usize>().ok());
        let is_many = |name: &str| number(name).is_some_and(|n| n > 1);
        let is_step = variable("SLURM_STEP_ID").is_some();
        #[cfg(unix)]
        {
            let by_pmix = variable("PMIX_RANK").is_some() && is_step && is_many("SLURM_NTASKS");
            let names: Option<Vec<&str>> = match () {
                () if is_many("OMPI_COMM_WORLD_SIZE") => Some(OPEN_MPI.to_vec()),
                () if is_many("PMI_SIZE") => Some(MPICH.to_vec()),
                () if by_pmix => Some([&OPEN_MPI[..], &MPICH].concat()),
                () => None,
            };
            if let Some(names) = names {
                let own = variable("ELAPID_MPI").into_iter();
                return Ok(Launcher::Mpi(own.chain(names.into_iter().map(String::from)).collect()));
            }
        }
        let n_ranks = number("WORLD_SIZE").or(number("SLURM_NTASKS").filter(|_| is_step));
        let rank = number("RANK").or(number("SLURM_PROCID").filter(|_| is_step));
        let (Some(rank), Some(n_ranks @ 2..)) = (rank, n_ranks) else { return Ok(Launcher::None) };
        let hint = "use `mpirun -n N elapid ...` or `srun --mpi=pmix`, or set RANK, WORLD_SIZE, \
                    MASTER_ADDR and MASTER_PORT";
        let (Some(address), Some(port)) = (variable("MASTER_ADDR"), number("MASTER_PORT")) else {
            let problem = format!("{n_ranks} processes were started, but not how they meet");
            return Err(Failure::new(problem, hint));
        };
        // There torchrun keeps a store of its own.
        let is_taken = variable("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        let port = u16::try_from(port + usize::from(is_taken)).ok().filter(|_| rank < n_ranks);
        let Some(port) = port else {
            let problem = format!("rank {rank} of {n_ranks} at {address} with no such port");
            return Err(Failure::new(problem, hint));
        };
        Ok(Launcher::Tcp(Place { rank, n_ranks, address, port }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by(list: &[(&str, &str)]) -> Done<Launcher> {
        Launcher::by(&|name| list.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_string()))
    }

    #[test]
    fn variables_of_launchers_decide_and_without_them_a_process_is_alone() {
        assert_eq!(by(&[]).unwrap(), Launcher::None);
        assert_eq!(by(&[("OMPI_COMM_WORLD_SIZE", "1")]).unwrap(), Launcher::None);
        // A batch script of Slurm, outside of a step.
        assert_eq!(by(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]).unwrap(), Launcher::None);
        let torchrun = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ];
        let place = Place { rank: 1, n_ranks: 2, address: "node0".into(), port: 29501 };
        assert_eq!(by(&torchrun).unwrap(), Launcher::Tcp(place));
        let place = Place { rank: 1, n_ranks: 2, address: "node0".into(), port: 29500 };
        assert_eq!(by(&torchrun[..4]).unwrap(), Launcher::Tcp(place));
        assert!(by(&torchrun[..2]).unwrap_err().problem.contains("not how they meet"));
        let slurm = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "4"), ("SLURM_STEP_ID", "0")];
        assert!(by(&slurm).is_err());
        assert!(by(&[("RANK", "2"), torchrun[1], torchrun[2], torchrun[3]]).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_launcher_of_mpi_names_the_libraries_to_try() {
        let names = |list: &[(&str, &str)]| match by(list).unwrap() {
            Launcher::Mpi(names) => names,
            other => panic!("{other:?}"),
        };
        assert_eq!(names(&[("OMPI_COMM_WORLD_SIZE", "2")])[0], "libmpi.so.40");
        assert_eq!(names(&[("PMI_SIZE", "2")])[0], "libmpich.so.12");
        let own = [("PMI_SIZE", "2"), ("ELAPID_MPI", "mpi/libmpi.so")];
        assert_eq!(names(&own)[0], "mpi/libmpi.so");
    }
}
