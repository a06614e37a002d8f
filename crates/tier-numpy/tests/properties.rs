//! Any type and any array survive JSON, files and the form, exactly.

use proptest::prelude::*;
use rung::{Descr, Leaf, Room, Rung, Session, Trust, Value};
use tier_numpy::{Numpy, npy};

proptest! {
    #[test]
    fn any_type_survives_json(descr in testkit::values::descr()) {
        let json = serde_json::to_string(&descr).unwrap();
        let back: Descr = serde_json::from_str(&json).unwrap();
        prop_assert_eq!(&back, &descr, "{}", json);
        // Through a generic reader too, which knows of no tuples.
        let generic: serde_json::Value = serde_json::from_str(&json).unwrap();
        prop_assert_eq!(serde_json::from_value::<Descr>(generic).unwrap(), descr);
    }

    #[test]
    fn any_array_survives_a_file(array in testkit::values::array()) {
        let mut file = Vec::new();
        npy::write(&array, &mut file).unwrap();
        let back = npy::read(file).unwrap();
        prop_assert_eq!(back.shape(), array.shape());
        prop_assert_eq!(back, array);
    }

    #[test]
    fn any_array_survives_the_form(array in testkit::values::array()) {
        let offer = Numpy.probe().unwrap();
        let Ok(Session::Form(form)) = Numpy.open(&offer, &offer, Trust::none()) else {
            panic!("a form");
        };
        let lowered = form.lower(Leaf::Array(&array)).unwrap();
        prop_assert_eq!(form.raise(lowered, &mut Room::of(1 << 20)).unwrap(), Value::from(array));
    }

    #[test]
    fn any_text_is_a_type_or_an_error(text in r#"(\[|\]|,|"[<>|=]?[bifucMmSUVO]?[0-9]{0,3}(\[(25)?(ns|D|x)?\])?"|"a"|[0-9]){1,20}"#) {
        if let Ok(descr) = serde_json::from_str::<Descr>(&text) {
            let json = serde_json::to_string(&descr).unwrap();
            prop_assert_eq!(serde_json::from_str::<Descr>(&json).unwrap(), descr);
        }
    }
}
