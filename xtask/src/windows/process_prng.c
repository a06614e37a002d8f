/* Wine 8 lacks the one function of bcryptprimitives.dll that Rust's std imports; Windows has it. */
#include <windows.h>

BOOLEAN NTAPI SystemFunction036(PVOID, ULONG);

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE bytes, SIZE_T count)
{
    while (count) {
        ULONG some = count > 0x10000000 ? 0x10000000 : (ULONG)count;
        if (!SystemFunction036(bytes, some))
            return FALSE;
        bytes += some;
        count -= some;
    }
    return TRUE;
}
