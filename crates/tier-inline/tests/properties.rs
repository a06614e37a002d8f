//! Any value survives the codec exactly, and any text gives a value or a fault.

use proptest::prelude::*;
use rung::Value;
use tier_inline::codec::{Plain, decode, encode};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_plain_value_survives(value in testkit::values::plain()) {
        let mut json = String::new();
        encode(&value, &mut json, &mut Plain).unwrap();
        let back = decode(&json, &mut Plain).unwrap();
        prop_assert_eq!(&back, &value, "{}", json);
        // One form for each value: what was read is written the same, so order survives too.
        let mut again = String::new();
        encode(&back, &mut again, &mut Plain).unwrap();
        prop_assert_eq!(again, json);
    }

    #[test]
    fn any_value_survives_serde(value in testkit::values::any_value()) {
        prop_assert_eq!(&rung::to_value(&value).unwrap(), &value);
        let pair = rung::to_value(&(&value, Some(&value))).unwrap();
        let (one, other) = rung::from_value::<(Value, Option<Value>)>(pair).unwrap();
        prop_assert_eq!(&one, &value);
        // An option of nothing is nothing.
        prop_assert_eq!(other.unwrap_or(Value::Null), value);
    }

    #[test]
    fn any_double_survives(bits in any::<u64>()) {
        let value = Value::from(f64::from_bits(bits));
        let mut json = String::new();
        encode(&value, &mut json, &mut Plain).unwrap();
        prop_assert_eq!(decode(&json, &mut Plain).unwrap(), value);
    }

    #[test]
    fn any_text_gives_a_value_or_a_fault(text in any::<String>()) {
        let _ = decode(&text, &mut Plain);
    }

    /// Close to the grammar, so that more than the first byte is looked at.
    #[test]
    fn near_misses_give_a_value_or_a_fault(
        text in r#"(\{|\}|\[|\]|,|:|"\$[tsmifboLTSB$]?"|"a"|1|-0|0\.5|1e999|null|"[0-9a-f]{16}"){1,24}"#,
    ) {
        if let Ok(value) = decode(&text, &mut Plain) {
            let mut json = String::new();
            encode(&value, &mut json, &mut Plain).unwrap();
            prop_assert_eq!(decode(&json, &mut Plain).unwrap(), value);
        }
    }
}
