//! Calls with any type that `serde` knows.

use rung::{BridgeError, from_value, to_value};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::channel::{CallOptions, Peer};
use crate::error::{CallError, CallErrorKind};
use crate::handler::{Failure, Methods};
use crate::route::Route;

/// An answer as a type.
#[derive(Debug)]
#[non_exhaustive]
pub struct Answer<T> {
    /// The answer.
    pub value: T,
    /// What each leaf of the argument rode.
    pub sent: Route,
}

impl Peer {
    /// Calls a method with anything that `serde` can serialize, and reads the answer as anything it can
    /// deserialize.
    ///
    /// Tensors, arrays, pickles, objects and values inside of them ride their rungs, as in [`Self::call`];
    /// their memory is shared with the argument's, not copied to be sent.
    ///
    /// ```no_run
    /// use ladder::{Tensor, Worker};
    /// use serde::{Deserialize, Serialize};
    ///
    /// #[derive(Serialize, Deserialize)]
    /// struct Job {
    ///     image: Tensor,
    ///     radius: f32,
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let worker = Worker::spawn_self()?;
    /// let image = Tensor::from_vec(vec![0u8; 640 * 480], &[480, 640])?;
    /// let blurred: Tensor = worker.call_as("blur", &Job { image, radius: 2.5 })?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::call`], without the value; [`CallErrorKind::BadArgument`] and
    /// [`CallErrorKind::WrongAnswer`] with the path to what does not fit.
    pub fn call_as<T: DeserializeOwned>(
        &self,
        method: &str,
        argument: &(impl Serialize + ?Sized),
    ) -> Result<T, CallError> {
        Ok(self.call_as_with(method, argument, CallOptions::new())?.value)
    }

    /// As [`Self::call_as`], with options, and what the argument rode.
    ///
    /// # Errors
    ///
    /// As [`Self::call_as`].
    pub fn call_as_with<T: DeserializeOwned>(
        &self,
        method: &str,
        argument: &(impl Serialize + ?Sized),
        options: CallOptions,
    ) -> Result<Answer<T>, CallError> {
        let failed = |kind| CallError::new(method, kind, None);
        let argument =
            to_value(argument).map_err(|error| failed(CallErrorKind::BadArgument(error)))?;
        let reply = self.call_with(method, argument, options)?;
        let sent = reply.sent;
        let value = from_value(reply.read.value);
        let value = value.map_err(|error| failed(CallErrorKind::WrongAnswer(error)))?;
        Ok(Answer { value, sent })
    }
}

impl Methods {
    /// Adds a method whose argument and result are types that `serde` knows; the last one of a name counts.
    ///
    /// An argument of another type is an error at the caller, with the code `bad-argument` and the path.
    ///
    /// ```no_run
    /// use ladder::{Methods, Tensor};
    /// use serde::Deserialize;
    ///
    /// #[derive(Deserialize)]
    /// struct Job {
    ///     image: Tensor,
    ///     axis: usize,
    /// }
    ///
    /// let methods = Methods::new().on_as("mirror", |job: Job| Ok(job.image.flip(job.axis)?));
    /// ```
    #[must_use]
    pub fn on_as<A: DeserializeOwned, R: Serialize>(
        self,
        name: impl Into<String>,
        method: impl Fn(A) -> Result<R, Failure> + Send + Sync + 'static,
    ) -> Self {
        self.on_as_with(name, move |argument, _| method(argument))
    }

    /// As [`Self::on_as`], for a method that may call its caller back.
    #[must_use]
    pub fn on_as_with<A: DeserializeOwned, R: Serialize>(
        self,
        name: impl Into<String>,
        method: impl Fn(A, &Peer) -> Result<R, Failure> + Send + Sync + 'static,
    ) -> Self {
        self.on_with(name, move |argument, peer| {
            let wrong = |error: BridgeError| Failure::new("bad-argument", error.to_string());
            let result = method(from_value(argument).map_err(wrong)?, peer)?;
            to_value(&result).map_err(|error| Failure::new("unsendable", error.to_string()))
        })
    }
}
